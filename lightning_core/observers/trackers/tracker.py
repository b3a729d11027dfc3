"""The protocol of trackers, and the run that they report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_core.records.observer import RunState
from lightning_core.records.results import Evaluation, Result
from lightning_core.records.store import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as its trackers see it when it starts."""

    folder: Path
    """The run's folder. A tracker may keep files there."""
    name: str
    config: Mapping[str, Any]
    """The resolved configuration, as JSON has it."""
    tags: Sequence[str] = ()
    """``run.tags``."""
    steps_done: int = 0
    """Number of updates before it starts: more than 0 if the run is resumed."""
    resumed: bool = False
    with_checkpoint: bool = False
    """Whether the last checkpoint is an artifact too: ``run.report_checkpoint``."""

    def read_id(self, tracker: str) -> str | None:
        """The id that `keep_id` stored in the run's folder, if the run is resumed."""
        path = self._id_path(tracker)
        return path.read_text(encoding="utf-8").strip() if self.resumed and path.is_file() else None

    def keep_id(self, tracker: str, identity: str) -> None:
        """Store the tracker's own id of this run in the run's folder, for when the run is resumed."""
        # One file per tracker, since trackers start concurrently, each on its own thread.
        self._id_path(tracker).write_text(f"{identity}\n", encoding="utf-8")

    def _id_path(self, tracker: str) -> Path:
        return self.folder / f"tracker-{tracker}.id"


class Tracker(Protocol):
    """Receives a run's metrics and results. Created by a factory that gets the `TrackedRun`.

    All calls, including the factory's, run in order on the tracker's own thread, so training does not
    wait for them. Their errors are logged and counted.
    """

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """``step`` updates are done; ``metrics``: the values of its line in ``metrics.jsonl``."""
        ...

    def on_evaluation(self, step: int, phase: Phase, evaluation: Evaluation) -> None:
        """The held-out tasks were evaluated after ``step`` updates, before (``eval_before``), during or after training."""
        ...

    def on_end(self, state: RunState, result: Result | None) -> None:
        """The run ended; ``result`` is None unless it finished. The last call."""
        ...
