"""Evaluations with the current weights: a run's own on its held-out tasks, and single ones."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_core.config import Config
from lightning_core.records.observer import Observers
from lightning_core.records.results import Evaluation, to_evaluation
from lightning_core.records.statistics.held_out import check_held_out
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.attempt import Task
from lightning_core.rollouts.background import BackgroundLoop
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.recorded import RecordedAgents


class Evaluations:
    """Makes and records evaluations. ``step``: always the number of updates so far."""

    def __init__(
        self,
        config: Config,
        tasks: Sequence[Task],
        *,
        collector: Collector,
        background: BackgroundLoop,
        store: Store,
        observers: Observers,
        recorded: RecordedAgents,
    ) -> None:
        """``tasks``: the run's held-out tasks. If there are none, it makes no evaluations of its own."""
        self._config = config
        self._tasks = tasks
        self._collector = collector
        self._background = background
        self._store = store
        self._observers = observers
        self._recorded = recorded

    def lacks_before(self) -> bool:
        """Whether there are held-out tasks, and no evaluation of the initial weights is recorded.

        Raises `ConfigError` if that has other tasks.
        """
        return bool(self._tasks) and not check_held_out(self._store, {str(task["id"]): None for task in self._tasks})

    def before(self) -> None:
        """Evaluate the initial weights."""
        self.evaluate(self._tasks, "eval_before", 0)

    def during(self, step: int) -> bool:
        """Evaluate if ``eval.every`` requires it after ``step``, unless it is recorded. Whether it was required.

        In a run that is resumed past its end, the evaluation after its last step counts as this one.
        """
        every = self._config.eval.every
        if not self._tasks or not every or step % every or not 0 < step < self._config.trainer.steps:
            return False
        if not self._is_recorded("eval", step) and not self._store.change_phase("eval_after", "eval", step):
            self.evaluate(self._tasks, "eval", step)
        return True

    def has_after(self, step: int) -> bool:
        """Whether nothing is left to evaluate after the last step, ``step``."""
        return not self._tasks or self._is_recorded("eval_after", step)

    def after(self, step: int) -> None:
        """Evaluate after the last step, unless it is recorded."""
        if not self.has_after(step):
            self.evaluate(self._tasks, "eval_after", step)

    def evaluate(self, tasks: Sequence[Task], phase: Phase, step: int) -> Evaluation:
        """One pass over ``tasks``, ``eval.samples`` rollouts each.

        The rollouts of the run's own evaluations get their ``phase`` when all are recorded, in one transaction.
        """
        recorded: Phase = phase if phase == "eval_manual" else "eval_unfinished"
        self._observers.phase(phase, len(tasks) * self._config.eval.samples)
        groups = self._background.call(self._collector.roll_out_all, tasks, recorded, step)
        self._recorded.end_evaluation()
        self._store.change_phase(recorded, phase, step)
        found = to_evaluation((str(g.task["id"]), r.status, r.reward) for g in groups for r in g.rollouts)
        self._observers.on_evaluation(step, phase, found)
        return found

    def _is_recorded(self, phase: Phase, step: int) -> bool:
        """Whether a finished evaluation of the current weights is recorded."""
        return bool(self._store.rollouts(phase=phase, step=step, last=1))
