"""Trackers of a user: one that writes what it gets to a file in the run's folder, and faulty ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_core.observers.trackers import RunState, TrackedRun
from lightning_core.records.results import Evaluation, Result


def reported(folder: Path) -> list[list[Any]]:
    """What `RecordingTracker` got, in order."""
    return [json.loads(line) for line in (folder / "reported.jsonl").read_text().splitlines()]


class RecordingTracker:
    """Writes each call as a line of ``reported.jsonl``."""

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder
        self._write("start", run.name, run.config["policy"]["max_context"], list(run.tags), run.steps_done, run.resumed)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._write("step", step, dict(metrics))

    def on_evaluation(self, step: int, phase: str, evaluation: Evaluation) -> None:
        self._write("evaluation", step, phase, len(evaluation.rewards))

    def on_end(self, state: RunState, result: Result | None) -> None:
        self._write("end", state, None if result is None else result.checkpoint.name)

    def _write(self, *values: Any) -> None:
        with (self._folder / "reported.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")


class FailingTracker(RecordingTracker):
    """Fails at each step."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().on_step(step, metrics)
        raise OSError(f"no route to the server in step {step}")


def unreachable(run: TrackedRun) -> RecordingTracker:
    raise ConnectionError(f"no server for {run.name}")
