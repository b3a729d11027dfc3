"""The observers of a run are called in order, and one that only reports cannot end it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_core import load_config
from lightning_core.records.observer import ObservedRun, Observer, Observers, RunState
from lightning_core.records.report import Summary
from lightning_core.records.results import Recorded, Result
from lightning_core.records.steps import StepLog
from lightning_core.records.store import Store

CONFIG = load_config({"policy": {"model": "m"}, "trainer": {"steps": 9}})


class Noting(Observer):
    """Writes its name and what it is called with to a list."""

    def __init__(self, name: str, notes: list[Any], *, reason: str | None = None) -> None:
        self.name, self.notes, self.reason = name, notes, reason

    def open(self, run: ObservedRun) -> None:
        self.run = run
        self.notes.append((self.name, "open", run.folder.name, run.steps))

    def message(self, text: str) -> None:
        self.notes.append((self.name, text))

    def measure(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float]:
        return {f"{self.name}/{step}": metrics["reward"]}

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.notes.append((self.name, step, dict(metrics)))
        self.run.show(f"{self.name} saw {step}")

    def stop_reason(self) -> str | None:
        return self.reason

    def summarize(self, summary: Summary, recorded: Recorded) -> Summary:
        return replace(summary, stopped=f"{summary.stopped or ''}{self.name}{recorded.steps}")

    def close(self, state: RunState, result: Result | None) -> None:
        self.notes.append((self.name, state))


class Reporter(Noting):
    """Fails at each step."""

    only_reports = True

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        raise OSError(f"no route in step {step}")


def test_observers_are_called_in_order_and_a_step_is_recorded_between_measuring_and_showing(tmp_path: Path) -> None:
    notes: list[Any] = []
    observers = Observers([Noting("a", notes), Noting("b", notes, reason="enough"), Noting("c", notes, reason="late")])
    with Store(tmp_path / "store.db") as store, observers.watching(CONFIG, tmp_path, steps=3):
        log = StepLog(tmp_path, store, observers, after=0)
        recorded = log.add(1, {"reward": 0.5, "loss": float("nan")})
        assert recorded == {"reward": 0.5, "loss": None, "a/1": 0.5, "b/1": 0.5, "c/1": 0.5} == store.steps()[1]
        assert observers.stop_reason() == "enough"
    shown = [(name, f"{by} saw 1") for by in "abc" for name in "abc"]
    steps = [(name, 1, recorded) for name in "abc"]
    assert notes == [
        *((name, "open", tmp_path.name, 3) for name in "abc"),
        *(steps[0], *shown[:3], steps[1], *shown[3:6], steps[2], *shown[6:]),
        *((name, "finished") for name in "abc"),
    ]
    summary = Summary(eval=None, steps=1, rollouts=0, tokens_sampled=0, tokens_trained=0, wall_seconds=0.0, seed=0)
    with Store(tmp_path / "store.db", read_only=True) as store:
        assert observers.summarize(summary, Recorded(lines=[{"step": 1}], store=store)).stopped == "a1b1c1"


def test_one_that_only_reports_is_dropped_after_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes: list[Any] = []
    observers = Observers([Reporter("r", notes), Noting("a", notes)])
    with observers.watching(CONFIG, tmp_path):
        for step in (1, 2):
            observers.on_step(step, {})
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning == "Reporter is dropped, and the run goes on without it: OSError: no route in step 1"
    assert [note[1] for note in notes if note[0] == "r"] == ["open"]
    assert [note[1] for note in notes if note[0] == "a"] == ["open", 1, "a saw 1", 2, "a saw 2", "finished"]


def test_reporters_are_those_that_only_report() -> None:
    notes: list[Any] = []
    Observers([Noting("a", notes), Reporter("r", notes)]).reporters().message("hello")
    assert notes == [("r", "hello")]


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_the_error_of_any_other_ends_the_run(tmp_path: Path, error: type[BaseException], state: str) -> None:
    class Failing(Noting):
        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            raise error

    notes: list[Any] = []
    observers = Observers([Failing("f", notes), Reporter("r", notes)])
    with pytest.raises(error), observers.watching(CONFIG, tmp_path):
        observers.on_step(1, {})
    assert notes[-2:] == [("f", state), ("r", state)]
