"""The steps of an embedded run, and what they need.

`loop` is the algorithm that uses them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice

from lightning_core.credit import Credit, Episode
from lightning_core.records.steps import StepLog
from lightning_core.rollouts.attempt import Group, Rollout, Task
from lightning_core.rollouts.counts import counts_to_metrics, seconds_to_metrics
from lightning_core.rollouts.evaluations import Evaluations
from lightning_core.rollouts.interrupts import end_if_asked, save_asked
from lightning_core.rollouts.refill import spare_tasks, without_gradient
from lightning_core.trainers.checkpoint_keeper import CheckpointKeeper
from lightning_core.trainers.logprob_change import LogprobChange
from lightning_core.trainers.open_run import EmbeddedRun, open_run
from lightning_core.trainers.plan import Plan
from lightning_core.transitions import Row, Streams

logger = logging.getLogger(__name__)


class TrainingSession:
    """One embedded run, step by step. Created by `open_session`."""

    def __init__(self, plan: Plan, run: EmbeddedRun) -> None:
        """``run``: the open resources of ``plan``."""
        config, learner, store = plan.config, run.learner, run.store
        self.config = config
        self.learner = learner
        self.notes = run.notes
        """See `Trainer.notes`."""
        self.steps = run.steps
        """Number of updates so far."""
        self.store = store
        self.observers = plan.observers
        self.evaluations = Evaluations(
            config,
            plan.inputs.eval_tasks,
            collector=run.collector,
            background=run.background,
            store=store,
            observers=plan.observers,
            recorded=run.agents,
        )
        self._stopped: str | None = None
        self._picked = 0
        """Number of tasks of the current step, without those that `refill` adds."""
        self._began = self._collected = 0.0
        """When the current step began, and when its rollouts were trained on, by the monotonic clock."""
        self._plan = plan
        self._initial = run.initial
        self._agents = run.agents
        self._collector = run.collector
        self._background = run.background
        self._checkpoints = CheckpointKeeper(learner, config.trainer, plan.folder, store, step=run.steps)
        self._change = LogprobChange(learner, store, rollouts=config.trainer.measure_change)

    def rewind(self) -> None:
        """Drop what was recorded after the checkpoint, except rollouts of an interrupted step or evaluation under the same weights."""
        folder = self._plan.folder
        self._lacks_before = self.evaluations.lacks_before()
        if self.steps and not self._lacks_before:
            self._load()  # raises before a record is changed
        keep = () if self._lacks_before and self.steps else self._agents.find(folder, self.config, self.steps)
        if keep:
            self.observers.message(f"continues after step {self.steps}, with {len(keep)} rollouts recorded since")
        self._log = StepLog(folder, self.store, self.observers, after=self.steps, keep=keep)

    def start(self) -> None:
        """Evaluate the initial weights, unless that is recorded, and load the checkpoint to continue from."""
        if self._lacks_before or not self.steps:
            if self._initial.confirm(self.steps) and self._lacks_before:
                self.evaluations.before()
            self._load()
        if self.steps >= self.config.trainer.steps and self.evaluations.has_after(self.steps):
            self.observers.message(f"the run is complete after step {self.steps}: raise trainer.steps to train on")

    def _load(self) -> None:
        if self._plan.checkpoint is not None:
            self.learner.load(self._plan.checkpoint)

    def done(self) -> bool:
        """Whether all steps are done, or an observer ends the run. Raises `Interrupted` if a signal asked for the end after the step."""
        end_if_asked()
        self._stopped = self.observers.stop_reason()
        return self._stopped is not None or self.steps >= self.config.trainer.steps

    def pick_tasks(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """The tasks of the next step."""
        self._began = time.monotonic()
        picked = self._collector.pick_tasks(tasks, self.steps)
        self._picked = len(picked)
        return picked

    def roll_out(self, tasks: Sequence[Task], *, whole: bool = True) -> Sequence[Group]:
        """tasks → rollouts: a group of attempts at each task. ``whole``: they are all groups of the step."""
        self.observers.phase("train", len(tasks) * self.config.rollouts.group_size)
        return self._background.call(self._collector.roll_out_all, tasks, "train", self.steps, whole=whole)

    def annotate(self, groups: Sequence[Group]) -> Sequence[Episode]:
        """rollouts → transitions and rewards: the episodes that can be trained on, with what signals add."""
        return self._background.call(self._collector.annotate, groups, self.steps, required=True)

    def assign_credit(self, episodes: Sequence[Episode]) -> Credit:
        """rewards → advantages."""
        return self._collector.credit(episodes)

    def refill(
        self, tasks: Sequence[Task], groups: Sequence[Group], episodes: Sequence[Episode], credit: Credit
    ) -> tuple[Sequence[Group], Sequence[Episode], Credit]:
        """``groups``, ``episodes`` and ``credit`` with groups without a gradient replaced by groups of other tasks.

        A group has no gradient if all its advantages are 0, because its attempts earned the same. With ``rollouts.refill``, up to that
        many such groups per step are replaced (dynamic sampling, DAPO, arXiv 2503.14476). Groups that remain when the budget is spent
        stay and count in the means of the loss. The groups that were replaced stay among the returned ones, which are counted.
        """
        left = self.config.rollouts.refill
        spare = spare_tasks(tasks, [g.task for g in groups], seed=f"{self.config.run.seed}:{self.steps}")
        while left:
            flat = without_gradient(episodes, credit)
            others = list(islice(spare, min(len(flat), left)))
            if not others:
                break
            left -= len(others)
            more = self.roll_out(others, whole=False)
            dropped = set(flat[: len(others)])
            episodes = [*(e for e in episodes if e.task_id not in dropped), *self.annotate(more)]
            groups, credit = [*groups, *more], self._collector.credit(episodes)
        return groups, episodes, credit

    def streams(self, episodes: Sequence[Episode]) -> Streams:
        """Terms of the loss for single tokens."""
        return self._collector.streams(episodes)

    def record_credit(self, episodes: Sequence[Episode], credit: Credit) -> None:
        """Record the credit of each call."""
        self._collected = time.monotonic()
        self._collector.record_credit(episodes, credit, self.steps)

    def update(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """rows → new weights; returns the update's metrics."""
        return self._checkpoints.update(rows, self.observers.on_batch)

    def record(
        self,
        groups: Sequence[Group],
        episodes: Sequence[Episode],
        credit: Credit,
        rows: Sequence[Row],
        streams: Streams,
        metrics: Mapping[str, float],
    ) -> None:
        """Count the step, fit what signals learn, measure its change, record the metrics and call the observers.

        ``metrics``: the update's.
        """
        replaced = len(groups) - self._picked
        counts = self._collector.count(groups, episodes, credit, rows, streams, replaced=replaced)
        if not rows:
            logger.warning(
                "step %d: nothing to train on: all responses are masked: %d reached their token limit (algorithm.truncated), and %d "
                "rollouts had a refused request (rollouts.on_refused); raise rollouts.max_tokens or policy.max_context",
                *(self.steps + 1, counts["calls_truncated"], counts.get("rollouts_masked", 0)),
            )
        fitted = self._collector.fit(credit)
        self._agents.end_step()
        seconds = seconds_to_metrics(
            counts, rollouts=self._collected - self._began, update=time.monotonic() - self._collected
        )
        self.steps += 1
        self._change.measure(rows, self.steps)  # before the step is recorded: a run that ends in between takes it anew
        self._log.add(
            self.steps,
            {**counts_to_metrics(counts), **metrics, **fitted, **seconds},
            on_recorded=self._checkpoints.recorded,
        )

    def observe(self) -> None:
        """After a recorded step: save a checkpoint and evaluate at the configured intervals."""
        self._checkpoints.save_if_due(self.steps)
        if save_asked():
            self._checkpoints.save(self.steps)
            self.observers.message(f"checkpoint saved after step {self.steps}, as SIGUSR1 asked")
        self.evaluate_if_due()

    def evaluate_if_due(self) -> None:
        """Evaluate at the configured interval, and keep the best weights."""
        if self.evaluations.during(self.steps):
            self._checkpoints.keep_best(self.steps)

    def finish(self) -> None:
        """Show why the run ended early, save the last checkpoint, and evaluate."""
        if self._stopped is not None:
            self.observers.message(f"stopped after step {self.steps} of {self.config.trainer.steps}: {self._stopped}")
        end_if_asked()
        self._checkpoints.save(self.steps)
        self.evaluations.after(self.steps)
        self._checkpoints.keep_best(self.steps)

    def saving_progress(self) -> AbstractContextManager[None]:
        """See `CheckpointKeeper.saving_progress`."""
        return self._checkpoints.saving_progress(lambda: self.steps)


@contextmanager
def open_session(
    plan: Plan, *, weights_only: bool = False, on_rollout: Callable[[Rollout], None] = lambda _: None
) -> Generator[TrainingSession]:
    """A session of the run ``plan``; see `open_run`."""
    with open_run(plan, weights_only=weights_only, on_rollout=on_rollout) as run:
        yield TrainingSession(plan, run)
