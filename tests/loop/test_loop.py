"""The whole loop on a tiny random model: real endpoint, real client, real updates."""

import contextvars
import io
import itertools
import json
import signal
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pytest

from lightning_core import fit, load_config
from lightning_core.capture import scope
from lightning_core.errors import ConfigError, InfrastructureError, RewardError, TrainingError
from lightning_core.loop import evaluate
from lightning_core.observers.progress import PlainProgress, SilentProgress
from lightning_core.records.store import Store
from lightning_core.trace import LOGPROBS_AFTER, OUTPUT_IDS
from lightning_core.trainers.torch.scorer import RowScorer
from tests import bandit, warm
from tests.bandit_runs import RUN, settings
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_tiny_model_learns_a_bandit_through_the_real_endpoint(model: Path, tmp_path: Path):
    result = fit(config=load_config(settings(model, tmp_path)))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_reward_after"] > summary["eval_reward_before"] + 0.3
    assert summary["improvement_ci95"][0] > 0
    assert summary["steps"] == 12
    assert summary["rollouts"] == 12 * 32
    for key in (
        "eval_ci95_before",
        "eval_ci95_after",
        "tokens_sampled",
        "tokens_trained",
        "wall_seconds",
        "seed",
        "versions",
    ):
        assert summary[key] is not None, key
    assert (tmp_path / "latest").resolve() == result.folder.resolve()
    assert (result.folder / "curve.png").stat().st_size > 1000
    assert len((result.folder / "metrics.jsonl").read_text().splitlines()) == 12
    assert max(m["logprob_difference_max"] for m in result.metrics) < 1e-3, "sampler and trainer agree on every token"
    assert [m["context_new"] for m in result.metrics] == [32.0] * 12

    again = evaluate(
        config=load_config(settings(model, tmp_path)), folder=tmp_path / "again", checkpoint=result.checkpoint
    )
    mean = sum(sum(v) / len(v) for v in again.rewards.values()) / len(again.rewards)
    assert mean == pytest.approx(summary["eval_reward_after"], abs=0.05)

    with Store(result.folder / "store.db", read_only=True) as store:
        for metrics in result.metrics:
            trained = store.rollouts(step=metrics["step"], phase="train")
            assert fmean(r.reward or 0 for r in trained) == pytest.approx(metrics["reward"]), "numbered as the metrics"
        assert {(r.phase, r.step) for r in store.rollouts(phase="eval_after")} == {("eval_after", 12)}
        assert {r.phase for r in store.rollouts(step=0)} == {"eval_before"}
        (credit, *_) = store.credit(step=1)
        tokens = store.trace(credit.rollout).calls[0].output_ids
        assert tokens is not None
        assert credit.tokens == len(tokens)
        assert any(OUTPUT_IDS in s.attributes for s in store.spans(credit.rollout))


@pytest.mark.parametrize(
    ("concurrency", "deterministic", "sampling", "executor"),
    [
        (8, True, "curriculum", "task"),
        pytest.param(8, True, "uniform", "process", marks=pytest.mark.long),
        pytest.param(1, False, "uniform", "task", marks=pytest.mark.long),
    ],
)
def test_a_killed_run_resumes_to_the_same_weights(
    model: Path, tmp_path: Path, concurrency: int, deterministic: bool, sampling: str, executor: str
):
    """Killed after its third step with a checkpoint at the second: records and weights equal those of an uninterrupted run.

    Without `trainer.deterministic` this holds at concurrency 1. With it the uninterrupted run may have another concurrency.
    """
    config = settings(
        model,
        tmp_path,
        rollouts={"concurrency": concurrency, "group_size": 3, "executor": executor},
        trainer={"steps": 4, "deterministic": deterministic},
        tasks={"sampling": sampling},
        eval={"solved": 0.5, "every": 1, "tasks": 4},
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    other = 3 if deterministic else 1
    fit(config=load_config(str(file), ["run.name=whole", f"rollouts.concurrency={other}", "rollouts.executor=task"]))
    command = ["-c", RUN, str(file)]

    with warm.Warm([*command, "run.name=cut"]) as process:
        for line in process.stdout:
            if line.startswith("step 3"):
                process.send_signal(signal.SIGKILL)
    warm.run([*command, "run.name=cut", "run.resume=true"], check=True)

    def read(name: str) -> list[dict[str, Any]]:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]

    assert read("cut") == read("whole")
    assert [line["step"] for line in read("cut")] == [1, 2, 3, 4]
    weights = [tmp_path / name / "checkpoints" / "step-000004" / "model.safetensors" for name in ("cut", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    with (
        Store(tmp_path / "cut" / "store.db", read_only=True) as cut,
        Store(tmp_path / "whole" / "store.db", read_only=True) as whole,
    ):
        assert recorded(cut) == recorded(whole)
        assert cut.tokens_sampled() == whole.tokens_sampled()


def recorded(store: Store) -> list[tuple[Any, ...]]:
    """Phase, step, task, reward and sampled logprobs of each rollout, in a fixed order."""
    calls = ((r, store.trace(r.id).calls[0]) for r in store.rollouts())
    return sorted((r.phase, r.step, r.task_id, r.reward, bytes(c.logprobs)) for r, c in calls)


@pytest.mark.parametrize("wanted", [pytest.param(0, marks=pytest.mark.long), 3, 100])
def test_how_an_update_changes_its_tokens_is_recorded(model: Path, tmp_path: Path, wanted: int):
    """Of the first rollouts with an advantage. Together, tokens with an advantage above 0 become more likely."""
    config = settings(model, tmp_path, trainer={"steps": 1, "measure_change": wanted}, tasks={"eval": None})
    result = fit(config=load_config(config))
    with Store(result.folder / "store.db", read_only=True) as store:
        advantages = {row.rollout: row.advantage for row in store.credit(step=1) if row.advantage}
        calls = {r.id: store.trace(r.id).calls[0] for r in store.rollouts(phase="train")}
    changes: dict[str, float] = {}
    for rollout, call in calls.items():
        if LOGPROBS_AFTER in call.arrays:
            assert call.logprobs is not None
            changes[rollout] = float((call.arrays[LOGPROBS_AFTER] - call.logprobs).sum())
    assert len(changes) == min(wanted, len(advantages))
    assert changes.keys() <= advantages.keys()
    if wanted == 100:
        assert sum(advantages[rollout] * change for rollout, change in changes.items()) > 0


def test_a_resume_that_cannot_start_changes_no_configuration(model: Path, tmp_path: Path):
    few = {"group_size": 2}
    config = settings(model, tmp_path, trainer={"steps": 1}, tasks={"eval": None}, rollouts=few)
    folder = fit(config=load_config(config)).folder
    before = {path.name: path.read_bytes() for path in folder.glob("*.yaml")}
    run = {**config["run"], "resume": True}
    wrong = {**config, "policy": {**config["policy"], "model": str(tmp_path / "nowhere")}, "run": run}
    with pytest.raises(ConfigError, match="nowhere"):
        fit(config=load_config(wrong))
    assert {path.name: path.read_bytes() for path in folder.glob("*.yaml")} == before


def test_a_change_that_cannot_be_measured_does_not_end_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(scorer: RowScorer, rows: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(RowScorer, "logprobs", full)
    few = {"group_size": 4}
    config = settings(model, tmp_path, trainer={"steps": 3, "measure_change": 2}, tasks={"eval": None}, rollouts=few)
    assert len(fit(config=load_config(config)).metrics) == 3
    (message,) = [r.getMessage() for r in caplog.records if "measure_change" in r.getMessage()]
    assert "not measured from step 1 on: RuntimeError: out of memory" in message


def test_several_policies_of_failure(model: Path, tmp_path: Path):
    """An agent that sometimes raises is trained with reward 0 for these rollouts; its failures are counted."""

    def solve(task: dict[str, Any]) -> float:
        value = bandit.solve(task)
        if task["id"] == "t1":
            raise RuntimeError("t1 never works")
        return value

    result = fit(
        solve,
        config=load_config(
            settings(model, tmp_path, trainer={"steps": 2}, tasks={"eval": None, "sampling": "uniform"})
        ),
    )
    assert sum(m["rollouts_failed"] for m in result.metrics) == 8
    assert result.summary.eval is None


def test_agents_run_in_the_callers_context_and_may_use_anyio(model: Path, tmp_path: Path):
    variable = contextvars.ContextVar("variable", default="unset")
    seen: set[str] = set()

    def solve(task: dict[str, Any]) -> float:
        async def answer() -> float:
            return bandit.solve(task)

        seen.add(variable.get())
        return anyio.run(answer)

    variable.set("the caller's")
    few = {"group_size": 2}
    config = settings(model, tmp_path, trainer={"steps": 1}, tasks={"eval": None}, rollouts=few)
    result = fit(solve, config=load_config(config))
    assert seen == {"the caller's"}
    assert result.metrics[0]["rollouts_failed"] == 0


def test_lora_trains_one_agent_while_another_keeps_the_base_weights(model: Path, tmp_path: Path):
    def solve(task: dict[str, Any]) -> float:
        with scope("listener"):
            bandit.client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": task["prompt"]}])
        return bandit.solve(task)

    config = settings(
        model,
        tmp_path,
        agents={"train": ["talker"], "frozen": {"listener": "base"}},
        policy={"tuning": "lora", "lora": {"rank": 4}},
        rollouts={"group_size": 2},
        trainer={"steps": 2, "learning_rate": 1e-2},
        tasks={"eval": None},
    )
    result = fit(solve, config=load_config(config))
    with Store(result.folder / "store.db", read_only=True) as store:
        calls = [c for r in store.rollouts(step=2) for c in store.trace(r.id).calls]
    assert {(c.agent, c.model, c.policy_version) for c in calls} == {
        ("talker", "policy", 1),
        ("listener", "base", None),
    }
    assert {c.temperature for c in calls} == {1.0}


def test_wrong_names_list_the_known_ones(model: Path, tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"agents.train names 'talkre', but the agents of this program are \[.*'talker'"
    ):
        fit(config=load_config(settings(model, tmp_path, agents={"train": ["talkre"], "frozen": {"talker": "base"}})))


def test_an_agent_that_never_calls_a_model_is_an_error(model: Path, tmp_path: Path):
    with pytest.raises(
        TrainingError, match="no trained agent made a call in 32 rollouts; the first error: RuntimeError: broken"
    ):
        fit(broken, config=load_config(settings(model, tmp_path, tasks={"eval": None})))


def broken(task: dict[str, Any]) -> float:
    raise RuntimeError("broken")


def test_a_dead_upstream_stops_the_run_with_its_reason(model: Path, tmp_path: Path):
    """The only agent is not trained and uses another server, which is not running."""
    upstream = {"base_url": "http://127.0.0.1:9/v1"}
    config = settings(
        model,
        tmp_path,
        policy={"upstream": upstream},
        agents={"train": ["other"], "frozen": {"talker": "m"}},
        rollouts={"retries": 0},
    )
    with pytest.raises(
        InfrastructureError,
        match=r"all 16 rollouts had an infrastructure failure; the first:.*could not reach http://127.0.0.1:9",
    ):
        fit(config=load_config(config))


def test_a_long_update_shows_its_micro_batches_and_the_time_left(model: Path, tmp_path: Path):
    """Each look at the clock is a minute later."""
    rewards, minutes, stream = itertools.count(), itertools.count(), io.StringIO()

    def solve(task: dict[str, Any]) -> float:
        bandit.talk(task["prompt"])
        return float(next(rewards))

    config = settings(
        model,
        tmp_path,
        tasks={"eval": None},
        rollouts={"tasks_per_step": 1, "group_size": 4},
        trainer={"steps": 1, "micro_batch_tokens": 8},
    )
    progress = PlainProgress(stream, clock=lambda: 60.0 * next(minutes))
    batches = int(fit(solve, config=load_config(config), progress=progress).metrics[0]["micro_batches"])
    lines = [line.split() for line in stream.getvalue().splitlines() if line.startswith("update ")]
    assert batches > 1
    assert [words[1] for words in lines] == [f"{done}/{batches}" for done in range(1, batches)]
    assert all(words[-1] == "left" for words in lines)


def test_a_nan_reward_names_its_task(model: Path, tmp_path: Path):
    with pytest.raises(RewardError, match=r"task 't\d+': the agent returned nan"):
        fit(lambda task: float("nan"), config=load_config(settings(model, tmp_path)), progress=SilentProgress())


def test_resuming_nothing_and_overwriting_something_are_refused(model: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no run in"):
        fit(config=load_config(settings(model, tmp_path, run={"resume": True})))
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"exists; set another run\.name"):
        fit(config=load_config(settings(model, tmp_path)))
