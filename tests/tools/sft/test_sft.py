"""`lightning-rl sft` on tiny random models: from a teacher's recorded answers to a policy that gives them, and on to RL."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_core import Row, evaluate, fit, load_config
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.errors import ConfigError
from lightning_core.model.source import load_model
from lightning_core.observers.progress import SilentProgress
from lightning_core.records.report import read_metrics
from lightning_core.records.run_folder.checkpoints import checkpoints, choose_checkpoint
from lightning_core.records.store import Store
from lightning_core.tools.cli.main import main
from lightning_core.tools.serving import ServingEndpoint
from lightning_core.tools.sft.examples import Selection
from lightning_core.tools.sft.train import SftOptions, sft
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.tiny_model import make_tiny_model
from tests.tools.sft.sft_agents import SECRET

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def settings(model: Path, runs: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "tasks": {
            "train": {"source": "tests.tools.sft.sft_agents:tasks", "args": {"count": 8}},
            "eval": {"source": "tests.tools.sft.sft_agents:tasks", "args": {"count": 4, "start": 20}},
        },
        "policy": {"model": str(model), "max_context": 512, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 8, "executor": "task"},
        "trainer": {"steps": 1, "learning_rate": 5e-3, "checkpoint_every": 0},
        "run": {"dir": str(runs)},
        "eval": {"temperature": 0},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return {"agent": "tests.tools.sft.sft_agents:door", **merged}


def configuration(model: Path, runs: Path, path: Path, **sections: Any) -> str:
    path.write_text(yaml.safe_dump(settings(model, runs, **sections)), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of a teacher behind `policy.upstream` on the training tasks: the run's folder."""
    teacher = ScriptedBackend(lambda _: SECRET, models=("teacher",))
    folder = tmp_path_factory.mktemp("teacher") / "run"
    folder.mkdir()
    with ServingEndpoint(teacher, Chat(teacher.tokenizer), routing=Routing()) as server:
        own = settings(model, folder.parent)
        own["policy"]["upstream"] = {"base_url": server.url}
        own["agents"] = {"frozen": {"clerk": "teacher"}}
        own["tasks"]["eval"] = own["tasks"]["train"]
        config = load_config(own)
        (folder / "config.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
        found = evaluate(config=config, folder=folder)
    assert found.reward == 1.0
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """The rows of all steps."""
    rows: list[Row] = []
    step = TorchTrainer.step

    def spy(self: TorchTrainer, batch: Any, *on_batch: Any) -> Any:
        rows.extend(batch)
        return step(self, batch, *on_batch)

    monkeypatch.setattr(TorchTrainer, "step", spy)
    return rows


def mean_cross_entropy(folder: Path, rows: Sequence[Row]) -> float:
    """By torch, over the responses' tokens of all rows, each row computed alone."""
    model = load_model(folder, torch.float32)
    total, count = 0.0, 0
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        places = torch.from_numpy(np.flatnonzero(row.mask))
        total += float(torch.nn.functional.cross_entropy(logits[places - 1], ids[places], reduction="sum"))
        count += len(places)
    return total / count


def learn(config: str, *arguments: str) -> int:
    return main(["sft", *arguments, "-c", config])


@pytest.mark.slow
def test_an_agent_without_any_reward_learns_from_a_teacher_and_goes_on_with_rl(
    model: Path, recorded: Path, tmp_path: Path, seen: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its held-out reward is 0, then 1: it says what the teacher said to other prompts. RL then starts from the weights."""
    config = configuration(model, tmp_path, tmp_path / "lightning.yaml", agents={"train": ["clerk"]})
    options = ["--phase", "eval_manual", "--epochs", "8", "--batch", "3", "--held-out", "0.25", "run.name=warm"]
    assert learn(config, str(recorded), *options) == 0
    output = capsys.readouterr()
    assert "6 rollouts to learn from (6 rows, 60 tokens of responses), 2 held out" in output.err
    assert "0 calls with recorded tokens, 16 rendered by the chat template" in output.err

    run = tmp_path / "warm"
    metrics = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 17))
    assert metrics[0]["ce_loss"] == pytest.approx(mean_cross_entropy(model, seen[:3]), rel=1e-5)
    assert metrics[0]["tokens_ce"] == 30
    held = [m["held_out_ce_loss"] for m in metrics if "held_out_ce_loss" in m]
    document = json.loads((run / "sft.json").read_text())
    assert document["held_out_losses"][1:] == held
    assert len(held) == 8
    assert held[-1] < 0.2 < 3 < document["held_out_losses"][0]
    assert f"held-out loss: {document['held_out_losses'][0]:.4f} before" in output.out
    assert len(seen) == 48, "6 rollouts, one row each, in 8 epochs"

    before = evaluate(config=load_config(settings(model, tmp_path)), folder=_empty(tmp_path / "a"))
    assert before.reward == 0.0
    weights = str(checkpoints(run)[-1])
    after = fit(config=load_config(settings(model, tmp_path, run={"name": "rl"}), [f"policy.model={weights}"]))
    assert after.summary.eval is not None
    assert after.summary.eval.eval_reward_before == 1.0
    assert main(["eval", str(run)]) == 0, "the run's folder can be evaluated as any other"
    assert "held-out reward 1.000" in capsys.readouterr().out


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


class _Shown(SilentProgress):
    """Records the order of phases and steps."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def phase(self, name: str, total: int | None = None) -> None:
        self.order.append("phase")

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        self.order.append("step")


def test_the_time_left_counts_every_update(model: Path, recorded: Path, tmp_path: Path) -> None:
    """It is computed from the phases between two steps."""
    shown = _Shown()
    sft(
        [recorded],
        config=load_config(settings(model, tmp_path, agents={"train": ["clerk"]}, run={"name": "timed"})),
        selection=Selection(phase="eval_manual"),
        options=SftOptions(batch=3, held_out=0.25),
        progress=shown,
    )
    assert shown.order == ["phase", "step"] * 2


def third_update(history: Sequence[Mapping[str, Any]], held_out: object) -> str | None:
    """A monitor that stops a run after three updates."""
    return "three updates" if len(history) == 3 else None


def test_weights_that_were_not_measured_are_not_the_best(model: Path, recorded: Path, tmp_path: Path) -> None:
    """A monitor stops the run within its second epoch, before the held-out loss is measured again."""
    name = f"{__name__}:{third_update.__name__}"
    sections = {"agents": {"train": ["clerk"]}, "monitors": {"add": [name], "stop": [name]}}
    found = sft(
        [recorded],
        config=load_config(settings(model, tmp_path, **sections, run={"name": "stopped"})),
        selection=Selection(phase="eval_manual"),
        options=SftOptions(batch=3, held_out=0.25, epochs=2),
        progress=SilentProgress(),
    )
    assert [path.name for path in checkpoints(found.folder)] == ["step-000002", "step-000003"]
    assert choose_checkpoint(found.folder, "best").name == "step-000002"


@pytest.mark.slow
def test_good_rollouts_of_a_run_are_learned_with_their_own_tokens(
    model: Path, tmp_path: Path, seen: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rejection sampling: the two best of each task, token for token as they were sampled. The adapter is merged to go on."""
    rl = settings(model, tmp_path, run={"name": "rl"}, rollouts={"group_size": 4})
    fit(config=load_config({**rl, "agent": "tests.bandit:solve", "tasks": {"train": rl["tasks"]["train"]}}))
    seen.clear()
    config = configuration(
        model, tmp_path, tmp_path / "lightning.yaml", policy={"tuning": "lora"}, trainer={"checkpoint_every": 10}
    )
    options = ["--min-reward", "0", "--best", "2", "--held-out", "0", "--epochs", "3", "run.name=rft"]
    assert learn(config, str(tmp_path / "rl"), *options) == 0
    output = capsys.readouterr().err
    assert "left out: 4 rollouts beyond the best 2 rollouts of their task" in output
    assert "4 calls with recorded tokens" in output
    with Store(tmp_path / "rl" / "store.db", read_only=True) as store:
        rewards = {r.id: (r.task_id, r.reward) for r in store.rollouts(phase="train")}
        calls = {call.id: call for number in range(1, 9) for call in store.trace(number).calls}
    assert len(seen) == 12
    for row in seen:
        (segment,) = row.segments
        call = calls[segment.call]
        assert call.prompt_ids is not None
        assert call.output_ids is not None
        assert row.token_ids.tolist() == [*call.prompt_ids.tolist(), *call.output_ids.tolist()]
    for task in {task for task, _ in rewards.values()}:
        chosen = {row.rollout for row in seen if rewards[row.rollout][0] == task}
        best = sorted((value for name, value in rewards.values() if name == task), reverse=True)[:2]
        assert sorted((rewards[rollout][1] for rollout in chosen), reverse=True) == best

    run = tmp_path / "rft"
    assert [path.name for path in checkpoints(run)] == ["step-000002", "step-000003"]
    assert not list(run.rglob("optimizer.safetensors"))
    assert main(["export", str(run), str(tmp_path / "merged")]) == 0
    trained = json.loads((run / "checkpoints" / "step-000003" / "adapter_config.json").read_text())
    assert trained["base_model_name_or_path"] == str(model)
    merged = load_model(tmp_path / "merged", torch.float32)
    assert any(
        not torch.equal(w, merged.state_dict()[n]) for n, w in load_model(model, torch.float32).state_dict().items()
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{run}"], "no rollouts of the phase 'train', but 8 of eval_manual: choose one with --phase or as FOLDER:PHASE"),
        (["{run}:eval_manual", "{run}"], "no rollouts of the phase 'train', but 8 of eval_manual: choose one with --phase or"),
        (["{run}:eval_manual", "--min-reward", "2"], "8 rollouts with a reward below 2. Lower --min-reward"),
        (["{run}", "--phase", "eval_manual", "agents.train=null"], "the rollouts have the agents 'clerk' (16 calls). Set agents.train"),
        (["{run}", "--phase", "eval_manual", "agents.train=[cook]"], "agents.train is ['cook']; the rollouts have the agents"),
        (["{run}", "--phase", "eval_manual", "policy.max_context=16", "rollouts.max_tokens=2"], "more than policy.max_context = 16 tokens"),
        (["{run}", "--phase", "eval_manual", "trainer.warmup_steps=9"], "warmup_steps is 9, but must be less than the number of updates"),
        (["{run}", "--held-out", "1"], "--held-out 1: expected a share from 0 to less than 1"),
        (["{run}", "run.resume=true"], "supervised fine-tuning cannot be resumed"),
        (["nowhere"], "'nowhere' does not exist; expected a run's folder"),
        (["{tmp}"], "is a folder without traces"),
    ],
    ids=["phase", "phase of one", "reward", "marked", "name", "long", "warm-up", "share", "resume", "missing", "folder"],
)  # fmt: skip
def test_what_cannot_be_learned_is_an_error_before_a_run_exists(
    model: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    empty = _empty(tmp_path / "empty")
    config = configuration(model, tmp_path / "runs", tmp_path / "lightning.yaml", agents={"train": ["clerk"]})
    given = [word.format(run=recorded, tmp=empty) for word in arguments]
    assert learn(config, *given) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_supervised_run_is_not_resumed(model: Path, recorded: Path, tmp_path: Path) -> None:
    config = configuration(model, tmp_path, tmp_path / "lightning.yaml", agents={"train": ["clerk"]})
    assert learn(config, str(recorded), "--phase", "eval_manual", "run.name=warm") == 0
    with pytest.raises(ConfigError, match="is a run of `lightning-rl sft`, which cannot be resumed"):
        fit(config=load_config(settings(model, tmp_path, run={"name": "warm", "resume": True})))


def test_policies_learn_their_own_agents(model: Path, recorded: Path, tmp_path: Path) -> None:
    config = configuration(
        model,
        tmp_path,
        tmp_path / "lightning.yaml",
        policies={"a": {"agents": ["clerk"]}, "b": {"agents": ["cook"]}},
        policy={"tuning": "lora"},
    )
    assert learn(config, str(recorded), "--phase", "eval_manual", "--epochs", "2", "run.name=two") == 0
    metrics = read_metrics(tmp_path / "two" / "metrics.jsonl")
    assert metrics[1]["a/ce_loss"] < metrics[0]["a/ce_loss"]
    assert "b/ce_loss" not in metrics[0]
