"""Runs that are killed, damaged or asked to save, and go on. A tiny random model."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lightning_core import fit, load_config
from lightning_core.config import dump_config
from lightning_core.errors import ConfigError, TrainingError
from lightning_core.observers.progress import SilentProgress
from lightning_core.records.failures import check_writable
from lightning_core.records.run_folder.checkpoints import checkpoints, choose_checkpoint
from lightning_core.records.run_folder.folder import open_run_folder
from lightning_core.records.run_folder.manifest import MANIFEST, OPTIMIZER, RUN_ID
from lightning_core.records.store import Store
from lightning_core.rollouts.interrupts import Interrupted, end_if_asked, interruptible
from lightning_core.rollouts.recorded import RecordedAgents
from lightning_core.tools.cli.main import main
from lightning_core.trainers.initial_weights import INITIAL
from lightning_core.trainers.torch.checkpoint import restore_moments
from tests import bandit, warm
from tests.bandit_runs import settings
from tests.loop.test_endings import default_handlers
from tests.tiny_model import make_tiny_model

HELD_OUT = bandit.tasks(2, start=100)
PER_STEP = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def config(model: Path, runs: Path, **sections: dict[str, Any]) -> Any:
    base: dict[str, dict[str, Any]] = {
        "tasks": {"eval": None},
        "rollouts": {"tasks_per_step": 2, "group_size": 2, "concurrency": 1},
        "trainer": {"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 3, "deterministic": True},
        "policy": {"tuning": "lora"},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return load_config(settings(model, runs, **merged))


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, with an evaluation before and after."""
    runs = tmp_path_factory.mktemp("runs")
    fit(bandit.solve, config=config(model, runs), eval_tasks=HELD_OUT, progress=False)
    return runs / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


class Messages(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def resume(model: Path, runs: Path, solve: Any = bandit.solve, **sections: dict[str, Any]) -> list[str]:
    """Resume the run; returns its messages."""
    progress = Messages()
    own = config(model, runs, **{**sections, "run": {"resume": True, **sections.get("run", {})}})
    fit(solve, config=own, eval_tasks=HELD_OUT, progress=progress)
    return progress.texts


def lines(run: Path) -> list[Mapping[str, Any]]:
    """The run's metrics, without times."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in found]


def phases(run: Path) -> Mapping[tuple[str, int], int]:
    with Store(run / "store.db", read_only=True) as store:
        return Counter((r.phase, r.step) for r in store.rollouts())


KILLED = """
import os, signal, sys, time
from lightning_core import fit, load_config
from tests import bandit
from tests.loop.test_resume import HELD_OUT, phases
from pathlib import Path
last, file = int(sys.argv[1]), sys.argv[2]
config, done = load_config(file), 0
def solve(task):
    global done
    if done == last:
        while sum(phases(Path(config.run.dir) / "run").values()) < last:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    value = bandit.solve(task)
    done += 1
    return value
fit(solve, config=config, eval_tasks=HELD_OUT)
"""


@pytest.mark.parametrize(
    ("last", "found"),
    [
        pytest.param(1, {("eval_unfinished", 0): 1}, marks=pytest.mark.long),
        (5, {("eval_before", 0): 2, ("train", 1): 3}),
        pytest.param(9, {("eval_before", 0): 2, ("train", 1): 4, ("train", 2): 3}, marks=pytest.mark.long),
    ],
)
def test_recorded_rollouts_of_a_killed_step_or_evaluation_are_used(
    model: Path, finished: Path, tmp_path: Path, last: int, found: Mapping[tuple[str, int], int]
) -> None:
    """Killed with ``last`` rollouts recorded, with and without a checkpoint: it ends as a run that was not killed."""
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config(model, tmp_path)))
    assert warm.run(["-c", KILLED, str(last), str(file)]).returncode == -signal.SIGKILL
    assert phases(tmp_path / "run") == found

    calls = itertools.count()

    def solve(task: dict[str, Any]) -> float:
        next(calls)
        return bandit.solve(task)

    messages = resume(model, tmp_path, solve)
    assert [text for text in messages if text.startswith("continuing the run run from ")]
    (said,) = [text for text in messages if text.startswith("continues")]
    whole = phases(finished)
    assert next(calls) == sum(whole.values()) - last, "no rollout was made again"
    assert said.startswith("continues after step ")
    assert phases(tmp_path / "run") == whole
    assert lines(tmp_path / "run") == lines(finished)


@pytest.mark.long
def test_recorded_rollouts_are_not_used_after_a_change(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with default_handlers(), pytest.raises(Interrupted):
        fit(signalled(2, signal.SIGINT), config=config(model, tmp_path), progress=False)
    recorded = phases(tmp_path / "run")["train", 1]
    assert 1 <= recorded <= PER_STEP
    fit(
        bandit.solve,
        config=config(model, tmp_path, rollouts={"temperature": 0.5}, trainer={"threads": 1}, run={"resume": True}),
    )
    assert f"{recorded} recorded rollouts of the interrupted step or evaluation are not used" in caplog.text
    assert "because of what has changed: rollouts.temperature, trainer.threads" in caplog.text
    assert phases(tmp_path / "run") == {("train", 1): 4, ("train", 2): 4}


def test_changed_files_are_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (code := tmp_path / "code").mkdir()
    (code / "agent.py").write_text("a = 1")
    monkeypatch.chdir(code)
    with default_handlers(), pytest.raises(Interrupted):
        fit(signalled(2, signal.SIGINT), config=config(model, tmp_path), progress=False)
    (code / "agent.py").write_text("a = 2")
    (code / "train.log").write_text("interrupted")
    settings = config(model, tmp_path)
    with Store(tmp_path / "run" / "store.db", read_only=True) as store:
        assert list(RecordedAgents(cast("Any", None), store).find(tmp_path / "run", settings, 0)) == []
    assert "because of what has changed: the code in the working directory" in caplog.text
    assert "written or deleted since it was recorded: 'agent.py'\n" in caplog.text


def test_a_complete_run_says_so(model: Path, run: Path) -> None:
    seconds = [json.loads((run / "summary.json").read_text())["wall_seconds"]]
    for _ in range(2):
        texts = resume(model, run.parent, lambda task: pytest.fail("nothing is left to do"))
        assert "the run is complete after step 2: raise trainer.steps to train on" in texts
        seconds.append(json.loads((run / "summary.json").read_text())["wall_seconds"])
    assert seconds == sorted(set(seconds)), "those of all processes"


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_steps(model: Path, run: Path) -> None:
    first, *others = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    slow = [{**first, "seconds_update": 1000.0}, *others]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in slow))
    (run / "summary.json").unlink()
    resume(model, run.parent)
    assert json.loads((run / "summary.json").read_text())["wall_seconds"] > 1000


def test_an_evaluation_before_training_never_measures_trained_weights(
    model: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def answers() -> list[Any]:
        with Store(run / "store.db", read_only=True) as store:
            found = store.rollouts(phase="eval_before")
            assert {r.version for r in found} <= {0}
            return [store.trace(r.id).calls[0].digest for r in found]

    before = answers()
    (run / "store.db").unlink()
    resume(model, run.parent)
    assert answers() == before

    (run / "store.db").unlink()
    facts = json.loads((run / INITIAL).read_text())
    (run / INITIAL).write_text(json.dumps({**facts, "weights": "0" * 64}))
    resume(model, run.parent)
    assert answers() == []
    assert "the evaluation before training is not recorded, and cannot be made" in caplog.text


@pytest.mark.long
def test_a_run_without_updates_does_not_continue_with_other_weights(model: Path, tmp_path: Path) -> None:
    with default_handlers(), pytest.raises(Interrupted):
        fit(signalled(2, signal.SIGINT), config=config(model, tmp_path), eval_tasks=HELD_OUT, progress=False)
    with pytest.raises(TrainingError, match="the model has other weights than when the run began"):
        resume(model, tmp_path, run={"seed": 1})  # which the adapter's first weights depend on


def flip(file: Path) -> None:
    """Change one bit."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def of_another_run(run: Path) -> None:
    (run / RUN_ID).write_text("another\n")
    older = run / "checkpoints" / "step-000001" / MANIFEST
    older.write_text(json.dumps({**json.loads(older.read_text()), "run": "another"}))


def twice(run: Path) -> None:
    file = run / "checkpoints" / "step-000002" / MANIFEST
    file.write_text(file.read_text().replace('"format": 1', '"format": 1, "format": 1'))


def renamed(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000002")
    shutil.copytree(run / "checkpoints" / "step-000001", run / "checkpoints" / "step-000003")


def test_settings_that_cannot_load_the_checkpoint_change_no_record(model: Path, run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000002")
    before = phases(run)
    with pytest.raises(
        TrainingError, match=r"lora_A' is \[16, 64\], but this trainer's is \[4, 64\]\. Restore the settings"
    ):
        resume(model, run.parent, policy={"tuning": "lora", "lora": {"rank": 4}})
    assert phases(run) == before


Damage = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("damage", "name", "problem"),
    [
        (lambda run: flip(newest(run) / "trainer" / OPTIMIZER), "step-000002", "its file 'trainer/optimizer.safetensors' is not the one"),
        (lambda run: flip(newest(run) / "adapter_model.safetensors"), "step-000002", "the hash differs"),
        (lambda run: (newest(run) / "trainer.json").unlink(), "step-000002", "its file 'trainer.json' is missing"),
        (lambda run: (newest(run) / "trainer.json").write_text("{}"), "step-000002", "has 2 bytes, but was written with"),
        (lambda run: (newest(run) / "trainer" / OPTIMIZER).unlink(), "step-000002", "has no optimizer state to resume from"),
        (lambda run: (newest(run) / MANIFEST).write_text("{"), "step-000002", "manifest.json is damaged: Expecting property name"),
        (lambda run: (newest(run) / MANIFEST).write_text("{}"), "step-000002", "manifest.json is damaged: it has no 'files'"),
        (lambda run: (newest(run) / MANIFEST).write_text("[]"), "step-000002", "its fields are not those of a manifest"),
        (lambda run: (newest(run) / MANIFEST).write_text("[" * 100_000), "step-000002", "nested too deep"),
        (twice, "step-000002", "the key 'format' is given twice"),
        (of_another_run, "step-000002", "another run wrote it"),
        (renamed, "step-000003", "it was written after step 1, not after step 3"),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_checkpoint_is_named_and_passed_over(
    model: Path, run: Path, caplog: pytest.LogCaptureFixture, damage: Damage, name: str, problem: str
) -> None:
    damage(run)
    _, checkpoint = open_run_folder(config(model, run.parent, run={"resume": True}))
    assert checkpoint == run / "checkpoints" / "step-000001"
    assert f"{name}' cannot be used" in caplog.text
    assert problem in caplog.text


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-000002"


def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(
    model: Path, finished: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(newest(run) / "adapter_model.safetensors")
    for name in ("step-000007.bak", "step-000099"):
        (run / "checkpoints" / name).mkdir()
    left = run / "checkpoints" / ".step-000002-abc.partial"
    left.mkdir()
    with pytest.raises(ConfigError, match=r"'adapter_model\.safetensors' is not the one that was written"):
        choose_checkpoint(run, "step-000002")
    resume(model, run.parent)
    assert lines(run) == lines(finished)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-000001", "step-000002", "step-000002.unused", "step-000007.bak", "step-000099",
    ]  # fmt: skip
    for path in checkpoints(run):
        flip(path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="has no checkpoint that can be used") as raised:
        resume(model, run.parent)
    assert "step-000001" in str(raised.value)


def test_an_optimizers_state_of_another_shape_is_refused() -> None:
    weight = torch.zeros(2, 3, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    for moments in ({"w/exp_avg": torch.zeros(3, 2)}, {"w/step": torch.zeros(2)}, {"v/exp_avg": torch.zeros(2, 3)}):
        with pytest.raises(TrainingError, match=r"the optimizer's state does not fit the weights: found '[wv]/"):
            restore_moments(optimizer, {"w": weight}, moments)


def signalled(at: int, number: int) -> Callable[[dict[str, Any]], float]:
    """The bandit, whose rollout ``at`` sends the signal ``number`` to the process."""
    rollouts = itertools.count(1)

    def solve(task: dict[str, Any]) -> float:
        if next(rollouts) == at:
            os.kill(os.getpid(), number)
        return bandit.solve(task)

    return solve


def test_sigusr1_saves_a_checkpoint_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    progress, own = Messages(), config(model, tmp_path, trainer={"steps": 3, "checkpoint_every": 0})
    fit(signalled(PER_STEP + 1, signal.SIGUSR1), config=own, progress=progress)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000002", "step-000003"]
    assert "checkpoint saved after step 2, as SIGUSR1 asked" in progress.texts


@pytest.mark.parametrize(("grace", "saved"), [(60.0, ["step-000001"]), pytest.param(0.0, [], marks=pytest.mark.long)])
def test_a_run_has_time_to_complete_its_step_after_sigterm(
    model: Path, tmp_path: Path, grace: float, saved: list[str]
) -> None:
    own = config(model, tmp_path, trainer={"checkpoint_every": 0}, run={"grace_seconds": grace})
    with default_handlers(), pytest.raises(Interrupted) as raised:
        fit(signalled(2, signal.SIGTERM), config=own, progress=False)
    assert raised.value.number == signal.SIGTERM
    assert [path.name for path in checkpoints(tmp_path / "run")] == saved


def test_the_time_after_sigterm_ends() -> None:
    def step() -> None:
        with interruptible(grace_seconds=0.05):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(60)

    with default_handlers(), pytest.raises(Interrupted):
        step()


def test_it_does_not_end_while_the_checkpoint_is_saved() -> None:
    def ends() -> None:
        with interruptible(grace_seconds=0.05):
            signal.raise_signal(signal.SIGTERM)
            try:
                end_if_asked()
            finally:
                time.sleep(0.2)
                saved.append("checkpoint")

    saved: list[str] = []
    with default_handlers(), pytest.raises(Interrupted):
        ends()
    assert saved == ["checkpoint"]


@pytest.mark.long
def test_a_run_is_moved_without_the_model_after_full_tuning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluated, exported and continued where the model that it began with is not."""
    own = make_tiny_model(tmp_path / "model")
    there, here = tmp_path / "there", tmp_path / "here"
    sections: dict[str, dict[str, Any]] = {"policy": {"tuning": "full"}, "tasks": {"eval": "tests.bandit:held_out"}}
    whole = config(own, there, **sections, trainer={"steps": 1}, eval={"tasks": 2})
    fit(config=whole, progress=False)
    shutil.move(there, here)
    shutil.rmtree(own)
    assert main(["eval", str(here / "run"), "eval.tasks=1"]) == 0
    assert main(["export", str(here / "run"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    fit(config=config(own, here, **sections, run={"resume": True}, eval={"tasks": 2}), progress=False)
    assert [path.name for path in checkpoints(here / "run")] == ["step-000001", "step-000002"]
    assert "the copy of the model in" in caplog.text + capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot write to the run's folder: .*'/proc/self/fd/.*set run\.dir"):
        check_writable(Path("/proc/self/fd"))
