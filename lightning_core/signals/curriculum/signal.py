"""Draws the tasks of a step by the recent attempts at them, which are read from the store, so a resumed run draws the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_core.records.statistics.task_history import recent_attempts
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import Task
from lightning_core.rollouts.signal import Resources, Signal
from lightning_core.signals.curriculum.sampling import count_picked, draw_tasks, sampling_probabilities
from lightning_core.signals.curriculum.section import is_automatic, sampling_floor


@dataclass(kw_only=True)
class CurriculumSignal(Signal):
    """The curriculum of a run."""

    store: Store
    size: int
    """Number of tasks per step."""
    floor: float
    solved: float
    seed: int
    is_automatic: bool = False
    """Whether ``tasks.sampling`` is ``auto``."""
    _counts: Mapping[str, float] = field(default_factory=dict[str, float])

    def notes(self) -> Sequence[str]:
        """The choice of the sampling, if it is automatic."""
        return (
            ["auto: tasks.sampling is curriculum: tasks that are sometimes solved are drawn more often"]
            if self.is_automatic
            else ()
        )

    def pick_tasks(self, tasks: Sequence[Task], step: int) -> Sequence[Task] | None:
        """The tasks of ``step``."""
        tried = recent_attempts(self.store, until=step, solved=self.solved)
        probabilities = sampling_probabilities(tasks, tried, self.floor)
        picked = draw_tasks(tasks, probabilities, self.size, seed=f"{self.seed}:curriculum:{step}")
        self._counts = count_picked(picked, tried)
        return picked

    def counts(self) -> Mapping[str, float]:
        """The tasks that were picked, and their success rates."""
        counted, self._counts = self._counts, {}
        return counted


def open_signal(resources: Resources) -> Signal | None:
    """The curriculum, unless ``tasks.sampling`` is uniform."""
    config = resources.config
    floor = sampling_floor(config)
    if floor is None:
        return None
    return CurriculumSignal(
        store=resources.store,
        size=config.rollouts.tasks_per_step,
        floor=floor,
        solved=config.eval.solved,
        seed=config.run.seed,
        is_automatic=is_automatic(config),
    )
