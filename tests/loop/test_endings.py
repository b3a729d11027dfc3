"""How runs end early: on errors and signals, with what was trained saved. A tiny random model."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_core import fit, load_config
from lightning_core.capture import reward
from lightning_core.errors import InfrastructureError, RewardError, TrainingError
from lightning_core.loop import evaluate
from lightning_core.observers.progress import SilentProgress
from lightning_core.records.report import read_summary
from lightning_core.records.run_folder.checkpoints import checkpoints
from lightning_core.records.store import Store
from lightning_core.rollouts.interrupts import Interrupted, interruptible, uninterrupted
from lightning_core.tools.cli.console import show
from lightning_core.tools.cli.main import main
from lightning_core.tools.cli.summary import make_summary
from lightning_core.tools.cli.tree import counted_reward
from tests import bandit
from tests.bandit_runs import settings
from tests.tiny_model import make_tiny_model

SMALL: dict[str, Any] = {
    "rollouts": {"tasks_per_step": 2, "group_size": 2, "retries": 0},
    "trainer": {"steps": 4, "checkpoint_every": 100},
    "tasks": {"eval": None},
}
PER_STEP = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def small(model: Path, runs: Path, **sections: dict[str, Any]) -> Any:
    merged = {key: {**SMALL.get(key, {}), **sections.get(key, {})} for key in {**SMALL, **sections}}
    return load_config(settings(model, runs, **merged))


def after(steps: int, then: Callable[[], Any]) -> Callable[[dict[str, Any]], Any]:
    """The bandit for ``steps`` steps, and then ``then``."""
    rollouts = itertools.count()

    def solve(task: dict[str, Any]) -> Any:
        value = bandit.solve(task)
        return value if next(rollouts) < steps * PER_STEP else then()

    return solve


def saved(runs: Path) -> list[str]:
    return [path.name for path in checkpoints(runs / "run")]


@pytest.mark.parametrize("value", [None, pytest.param(math.nan, marks=pytest.mark.long), 1e308])
def test_an_invalid_reward_stops_the_run_after_a_checkpoint(model: Path, tmp_path: Path, value: Any) -> None:
    with pytest.raises(RewardError, match=r"task 't\d+'.*rollouts\.max_invalid is 0"):
        fit(after(2, lambda: value), config=small(model, tmp_path))
    assert saved(tmp_path) == ["step-000002"]
    resumed = fit(bandit.solve, config=small(model, tmp_path, run={"resume": True}))
    assert [m["step"] for m in resumed.metrics] == [1, 2, 3, 4]


def test_within_the_budget_invalid_rewards_are_left_out_and_counted(model: Path, tmp_path: Path) -> None:
    values = itertools.chain([math.nan, None], itertools.repeat(0.5))
    result = fit(after(1, lambda: next(values)), config=small(model, tmp_path, rollouts={"max_invalid": 2}))
    assert [(m["rollouts_invalid"], m["rollouts_left_out"]) for m in result.metrics] == [(0, 0), (2, 2), (0, 0), (0, 0)]
    with Store(result.folder / "store.db", read_only=True) as store:
        assert len(store.rollouts(status="invalid")) == 2


class FailsAtStep2(SilentProgress):
    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise OSError("the display is gone")


def test_a_step_is_saved_when_its_display_fails(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the display is gone"):
        fit(bandit.solve, config=small(model, tmp_path), progress=FailsAtStep2())
    assert saved(tmp_path) == ["step-000002"]


def broken() -> float:
    raise RuntimeError("the database is missing")


def test_a_step_whose_rollouts_all_fail_stops_the_run_with_the_first_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match="all 4 rollouts failed; the first error: RuntimeError: the database is mis"
    ):
        fit(after(2, broken), config=small(model, tmp_path))
    assert saved(tmp_path) == ["step-000002"]


def test_an_evaluation_whose_rollouts_all_fail_is_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="all 16 rollouts failed; the first error: RuntimeError: the database"):
        evaluate(after(0, broken), config=load_config(settings(model, tmp_path)), folder=tmp_path / "eval")


def test_rollouts_that_fail_after_a_reward_are_outcomes(model: Path, tmp_path: Path) -> None:
    def fails() -> None:
        reward(0.5)
        broken()

    result = fit(after(0, fails), config=small(model, tmp_path, trainer={"steps": 1}))
    assert (result.metrics[0]["rollouts_failed"], result.metrics[0]["reward"]) == (4, 0.5)


def test_the_summary_counts_held_out_rollouts_that_failed_and_tasks_that_are_left_out(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: Counter[str] = Counter()

    def solve(task: dict[str, Any]) -> float:
        value, name = bandit.solve(task), task["id"]
        tries[name] += 1
        if name == "t101":
            raise ValueError("no gold")
        if name in ("t0", "t103") and tries[name] == 1:
            raise InfrastructureError("the judge is late")
        if name == "t102":
            raise InfrastructureError("the judge is gone")
        return value

    config = small(model, tmp_path, trainer={"steps": 1}, rollouts={"retries": 1})
    result = fit(solve, config=config, tasks=bandit.tasks(2), eval_tasks=bandit.tasks(8, start=100))
    found = read_summary(result.folder / "summary.json")
    assert [(e.evaluation, e.ending, e.number, e.rollouts) for e in found.held_out_endings] == [
        (when, ending, 1, 8) for when in ("before", "after") for ending in ("failed", "left_out")
    ]
    assert (found.eval_tasks_left_out, found.eval and found.eval.tasks) == (1, 7)
    assert (found.rollouts_left_out, list(found.first_errors)) == (0, ["repeated"])
    show(make_summary(found))
    printed = " ".join(capsys.readouterr().out.split())
    assert "on 7 tasks (1 more left out)" in printed
    failed = "1 of 8 held-out rollouts before training failed (scored with the reward so far, or 0); the first: ValueError: no gold"
    assert failed in printed
    assert "1 held-out task is excluded: all its rollouts were left out in one of the evaluations" in printed
    assert (
        "1 of 8 held-out rollouts before training were left out; the first: InfrastructureError: the judge is gone"
        in printed
    )
    with Store(result.folder / "store.db", read_only=True) as store:
        rewards = {counted_reward(r) for r in store.rollouts(phase="eval_after") if r.task_id in ("t101", "t102")}
    assert rewards == {"0.000 (not given)", "none"}


def test_a_broken_reward_function_stops_the_run_and_trains_nothing(model: Path, tmp_path: Path) -> None:
    def judge(task: dict[str, Any], result: Any) -> float:
        raise KeyError("gold")

    with pytest.raises(InfrastructureError, match=r"all 4 rollouts .*the reward function raised KeyError: 'gold'"):
        fit(bandit.solve, reward=judge, config=small(model, tmp_path))
    assert saved(tmp_path) == []


def test_a_model_with_nan_weights_is_named(model: Path, tmp_path: Path) -> None:
    damaged = make_tiny_model(tmp_path / "model")
    (file,) = damaged.glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if "mlp" in name)
    save_file({**weights, name: torch.full_like(weights[name], math.nan)}, file, metadata={"format": "pt"})
    with pytest.raises(TrainingError, match=r"1 of its weights contain NaN or infinity, such as 'model.*mlp"):
        fit(config=small(damaged, tmp_path))


@pytest.mark.long
def test_weights_that_become_too_large_end_the_run_with_a_clear_error(model: Path, tmp_path: Path) -> None:
    config = small(model, tmp_path, trainer={"learning_rate": 1e30, "warmup_steps": 0})
    with pytest.raises((TrainingError, InfrastructureError), match=r"not finite|the loss is"):
        fit(config=config)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_a_signal_saves_a_checkpoint_and_says_how_to_resume(
    model: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tenth rollout is in the third step."""
    calls = itertools.count(1)

    def solve(task: dict[str, Any]) -> float:
        value = bandit.solve(task)
        if next(calls) == 10:
            os.kill(os.getpid(), number)
        return value

    monkeypatch.setattr(bandit, "solve_then_signal", solve, raising=False)
    merged = {**SMALL, "rollouts": {**SMALL["rollouts"], "concurrency": 1}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**settings(model, tmp_path, **merged), "agent": "tests.bandit:solve_then_signal"}))
    with default_handlers():
        assert main(["train", str(file)]) == 128 + number
    assert saved(tmp_path) == ["step-000002"]
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    shown = capsys.readouterr().err
    assert f"lightning-rl: interrupted{by}. The last checkpoint is {tmp_path}/run/checkpoints/step-000002" in shown
    assert "run.name=run --resume" in shown


@contextmanager
def default_handlers() -> Generator[None]:
    """A shell that runs the tests in the background ignores SIGINT, and nohup SIGHUP."""
    before = {
        number: signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("signals", "completed", "number"),
    [([signal.SIGTERM], True, signal.SIGTERM), ([signal.SIGTERM, signal.SIGINT], False, signal.SIGINT)],
)
def test_a_signal_waits_for_the_end_of_an_update_but_a_second_one_does_not(
    signals: list[signal.Signals], completed: bool, number: int
) -> None:
    done: list[str] = []

    def update() -> None:
        with interruptible(), uninterrupted():
            for one in signals:
                signal.raise_signal(one)
            done.append("completed")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Interrupted) as caught:
            update()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (bool(done), caught.value.number, caught.value.midway) == (completed, number, not completed)


def test_a_signal_that_the_process_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigusr1_is_answered_where_no_checkpoint_can_be_asked_for() -> None:
    answers: list[str] = []
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with interruptible(on_save=lambda: answers.append("ignored")):
            signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert answers == ["ignored"]
