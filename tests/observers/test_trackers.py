"""Trackers get what a run measures. Their errors do not reach the run."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_core.config import Config, load_config
from lightning_core.config.sections import TRACKERS
from lightning_core.errors import ConfigError, MissingExtra
from lightning_core.observers.trackers import reporting, wandb
from lightning_core.observers.trackers.registry import TrackerFactory, tracker_factories
from lightning_core.observers.trackers.tracker import TrackedRun
from lightning_core.observers.trackers.values import checkpoint_files, evaluation_values, finite
from lightning_core.records.observer import Observers, RunState
from lightning_core.records.results import Evaluation, Result
from tests.observers.recording_tracker import FailingTracker, RecordingTracker, reported

RECORDING = "tests.observers.recording_tracker:RecordingTracker"


def configuration(*trackers: str, **run: Any) -> Config:
    return load_config({"policy": {"model": "m", "max_context": 999}, "run": {"report_to": list(trackers), **run}})


@contextmanager
def reported_to(
    config: Config,
    folder: Path,
    *,
    factories: Mapping[str, TrackerFactory] | None = None,
    checkpoint: Path | None = None,
) -> Iterator[Observers]:
    """A run in ``folder`` that only its trackers watch."""
    observers = Observers([reporting.Trackers(config, factories)])
    with observers.watching(config, folder, checkpoint):
        yield observers


def report(folder: Path, config: Config, *, steps: int = 2, error: type[BaseException] | None = None) -> None:
    with reported_to(config, folder) as observers:
        for step in range(1, steps + 1):
            observers.on_step(step, {"reward": step / 4})
        if error is not None:
            raise error


def test_a_tracker_of_the_user_gets_everything_in_order(tmp_path: Path) -> None:
    config = configuration(RECORDING, tags=["demo"])
    with reported_to(config, tmp_path) as observers:
        metrics = {"reward": 0.5}
        observers.on_evaluation(0, "eval_before", Evaluation(rewards={"t": [1.0]}, left_out=0))
        observers.on_step(1, metrics)
        metrics["reward"] = 9.0
    assert reported(tmp_path) == [
        ["start", tmp_path.name, 999, ["demo"], 0, False],
        ["evaluation", 0, "eval_before", 1],
        ["step", 1, {"reward": 0.5}],
        ["end", "finished", None],
    ]


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_a_run_that_does_not_finish_is_ended_with_its_state(
    tmp_path: Path, error: type[BaseException], state: str
) -> None:
    with pytest.raises(error):
        report(tmp_path, configuration(RECORDING), error=error)
    assert reported(tmp_path)[-2:] == [["step", 2, {"reward": 0.5}], ["end", state, None]]


def test_a_resumed_run_knows_its_steps(tmp_path: Path) -> None:
    config = configuration(RECORDING)
    with reported_to(config, tmp_path, checkpoint=Path("checkpoints/step-000012")):
        pass
    assert reported(tmp_path)[0] == ["start", tmp_path.name, 999, [], 12, True]


def test_errors_are_logged_once_with_the_name_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report(tmp_path, configuration(FailingTracker.__module__ + ":FailingTracker", RECORDING), steps=6)
    first, total = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "FailingTracker failed and will miss these values; training continues" in first
    assert "no route to the server in step 1" in first
    assert "3 errors of the tracker tests.observers.recording_tracker:FailingTracker" in total
    lines = reported(tmp_path)
    steps = [line[1] for line in lines if line[0] == "step"]
    assert sorted(steps) == [1, 1, 2, 2, 3, 3, 4, 5, 6], "after three errors in a row only the other one gets steps"
    assert [line for line in lines if line[0] == "end"] == [["end", "finished", None]] * 2


def test_a_tracker_that_cannot_be_created_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report(tmp_path, configuration("tests.observers.recording_tracker:unreachable"))
    first, total = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert first.endswith(f"ConnectionError: no server for {tmp_path.name}")
    assert "3 errors" in total


def test_a_tracker_is_created_again_after_an_error_and_gets_what_it_missed(tmp_path: Path) -> None:
    attempts: list[str] = []

    def late(run: TrackedRun) -> RecordingTracker:
        attempts.append(run.name)
        if len(attempts) < 3:
            sys.exit("not yet")
        return RecordingTracker(run)

    with reported_to(configuration(), tmp_path, factories={"late": late}) as observers:
        for step in (1, 2, 3):
            observers.on_step(step, {})
    assert [line[:2] for line in reported(tmp_path)[1:]] == [["step", 1], ["step", 2], ["step", 3], ["end", "finished"]]


def test_a_run_ends_although_its_tracker_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_NOTICE_SECONDS", 0.01)
    never = threading.Event()

    class HangingTracker(RecordingTracker):
        def on_step(self, step: int, metrics: Any) -> None:
            never.wait()

    config = configuration("tensorboard", report_seconds=0.02)
    with reported_to(config, tmp_path, factories={"slow": HangingTracker}) as observers:
        observers.on_step(1, {})
    waiting, given_up = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    never.set()
    assert "waiting for the tracker slow; Ctrl-C ends the wait" in waiting
    assert "tracker slow did not shut down in time" in given_up


def test_training_does_not_wait_for_a_slow_tracker(tmp_path: Path) -> None:
    may_go_on = threading.Event()

    class SlowTracker(RecordingTracker):
        def on_step(self, step: int, metrics: Any) -> None:
            assert may_go_on.wait(20), "the run waits for its tracker"
            super().on_step(step, metrics)

    with reported_to(configuration(), tmp_path, factories={"slow": SlowTracker}) as observers:
        for step in (1, 2, 3):
            observers.on_step(step, {})
        may_go_on.set()
    assert [line[0] for line in reported(tmp_path)] == ["start", "step", "step", "step", "end"]


def test_an_interrupt_ends_the_wait_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()

    class HangingTracker(RecordingTracker):
        def on_end(self, state: RunState, result: Result | None) -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            never.wait()

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell that runs the tests in the background ignores it
    try:
        with reported_to(configuration(), tmp_path, factories={"slow": HangingTracker}) as observers:
            observers.on_step(1, {})
    finally:
        never.set()
        signal.signal(signal.SIGINT, before)
    assert "the wait was interrupted" in caplog.text


def test_a_factory_without_a_tracker_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    factories: Any = {"none": lambda run: None}
    with reported_to(configuration(), tmp_path, factories=factories):
        pass
    assert "expected an object with on_step, on_evaluation and on_end, found NoneType" in caplog.text


def test_ids_of_trackers_that_start_together_are_kept_for_the_resumed_run(tmp_path: Path) -> None:
    run = TrackedRun(folder=tmp_path, name="a", config={})
    names = [f"tracker{number}" for number in range(20)]
    together = threading.Barrier(len(names))

    def start(name: str) -> None:
        together.wait()
        run.keep_id(name, f"id of {name}")

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(start, names))
    resumed = TrackedRun(folder=tmp_path, name="a", config={}, steps_done=4, resumed=True)
    assert [resumed.read_id(name) for name in names] == [f"id of {name}" for name in names]
    assert resumed.read_id("other") is None
    assert run.read_id("tracker1") is None, "a new run begins anew"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"report_to": ["wandbb"]},
            "found 'wandbb', expected tensorboard, wandb, mlflow, trackio, or 'module:callable'",
        ),
        ({"report_to": ["wandb", "wandb"]}, "expected each name once"),
        ({"tags": ["a", "a"]}, "expected each name once"),
        ({"tags": [""]}, "run.tags"),
    ],
)
def test_a_wrong_name_or_tag_is_an_error(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"policy": {"model": "m"}, "run": section})
    assert message in str(error.value)


def test_names_that_cannot_be_imported_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"run\.report_to: the module 'tests.observers.recording_tracker' has no 'Tracker'"
    ):
        tracker_factories(configuration("tests.observers.recording_tracker:Tracker"))
    monkeypatch.setattr(wandb, "PACKAGE", "no_such_package")
    expected = r"run.report_to: wandb needs the package 'no_such_package': pip install 'lightning-rl\[wandb\]'"
    with pytest.raises(MissingExtra, match=expected):
        tracker_factories(configuration("wandb"))
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("no_such_package") is not None
    with pytest.raises(MissingExtra):  # the folder of a run's local files, not the package
        tracker_factories(configuration("wandb"))


@pytest.mark.parametrize("name", TRACKERS)
def test_each_built_in_name_has_a_tracker_and_an_extra(name: str) -> None:
    module = import_module(f"lightning_core.observers.trackers.{name}")
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"][name][0].startswith(module.PACKAGE)
    assert {"on_step", "on_evaluation", "on_end"} <= vars(module.TRACKER).keys()


def test_only_finite_numbers_are_reported() -> None:
    assert finite({"a": 1, "b": None, "c": float("nan"), "d": "text", "e": True, "f": [1.0]}) == {"a": 1.0, "e": 1.0}
    assert evaluation_values(Evaluation(rewards={}, left_out=3)) == {"eval/tasks": 0.0, "eval/left_out": 3.0}
    found = evaluation_values(Evaluation(rewards={"a": [0.25, 0.5], "b": [0.125]}, left_out=0))
    assert 0 < found.pop("eval/reward_low") < 0.25 < found.pop("eval/reward_high") < 1
    assert found == {"eval/tasks": 2.0, "eval/left_out": 0.0, "eval/reward": 0.25}


def test_a_checkpoint_is_reported_without_the_state_of_the_optimizer(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    for name in ("a.json", "policy/model.safetensors", "policy/optimizer.safetensors"):
        (tmp_path / name).write_text("x")
    assert list(checkpoint_files(tmp_path)) == ["a.json", "policy/model.safetensors"]
