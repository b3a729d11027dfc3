"""An embedded run: weights, endpoint, agents and store, opened together.

`loop` is the algorithm that uses them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

from lightning_core.config import Config
from lightning_core.credit import Credit, Episode
from lightning_core.errors import ConfigError, LightningError, describe
from lightning_core.records.checkpoints import (
    best_checkpoint,
    checkpoint_step,
    delete_old,
    mark_best,
)
from lightning_core.records.observer import Observers
from lightning_core.records.results import Evaluation, held_out_rewards, to_evaluation
from lightning_core.records.steps import StepLog
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.attempt import Group, Rollout
from lightning_core.rollouts.background import BackgroundLoop, background_loop
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.counts import counts_to_metrics, seconds_to_metrics
from lightning_core.rollouts.interrupts import Interrupted, interruptible
from lightning_core.rollouts.local_agents import capturing, open_agents
from lightning_core.rollouts.refill import spare_tasks, without_gradient
from lightning_core.rollouts.runner import RewardFunction, Solve, Task
from lightning_core.rollouts.signal import Resources, open_signals
from lightning_core.trace import LOGPROBS_AFTER, POLICY, pack
from lightning_core.trainers import Learner, make_trainer
from lightning_core.transitions import Row, Streams

logger = logging.getLogger(__name__)


class TrainingSession:
    """The open resources of a run. Created by `open_session`."""

    def __init__(
        self,
        *,
        collector: Collector,
        background: BackgroundLoop,
        learner: Learner,
        notes: Sequence[str],
        steps: int,
        store: Store,
        observers: Observers,
        folder: Path,
    ) -> None:
        """``steps``: the number of updates that ``learner`` has."""
        self.config = collector.config
        self.learner = learner
        self.notes = notes
        """See `Trainer.notes`."""
        self.steps = steps
        """Number of updates so far."""
        self.store = store
        self.observers = observers
        self.folder = folder
        self._collector = collector
        self._background = background
        self._saved = steps
        """Number of updates in the newest checkpoint."""
        self._measures_change = True
        self._eval_tasks: Sequence[Task] = ()

    def start(self, eval_tasks: Sequence[Task]) -> None:
        """Evaluate ``eval_tasks`` before the first step. What was recorded after the loaded checkpoint is dropped."""
        self._log = StepLog(self.folder, self.store, self.observers, after=self.steps)
        self._eval_tasks = eval_tasks
        if eval_tasks and not self.store.rollouts(phase="eval_before", last=1):
            self.evaluate(eval_tasks, "eval_before")

    def done(self) -> bool:
        """Whether all steps are done, or an observer ends the run."""
        self._stopped = self.observers.stop_reason()
        return self._stopped is not None or self.steps >= self.config.trainer.steps

    def pick_tasks(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """The tasks of the next step."""
        self._began = time.monotonic()
        return self._collector.pick_tasks(tasks, self.steps)

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

    def record(
        self,
        groups: Sequence[Group],
        episodes: Sequence[Episode],
        credit: Credit,
        rows: Sequence[Row],
        streams: Streams,
        metrics: Mapping[str, float],
    ) -> None:
        """Count the step, fit what signals learn, record the metrics and call the observers. ``metrics``: the update's."""
        replaced = len(groups) - self.config.rollouts.tasks_per_step
        counts = self._collector.count(groups, episodes, credit, rows, streams, replaced=replaced)
        if not rows:
            logger.warning(
                "step %d: nothing to train on: all %d responses of the trained agents reached their token limit, and "
                "algorithm.truncated is mask; raise rollouts.max_tokens, or use truncated: train",
                *(self.steps + 1, counts["calls_truncated"]),
            )
        fitted = self._collector.fit(credit)
        seconds = seconds_to_metrics(
            counts, rollouts=self._collected - self._began, update=time.monotonic() - self._collected
        )
        self.steps += 1
        self._log.add(self.steps, {**counts_to_metrics(counts), **metrics, **fitted, **seconds})

    def observe(self, rows: Sequence[Row]) -> None:
        """After a recorded step: measure its change, and save a checkpoint and evaluate at the configured intervals."""
        self._measure_change(rows)
        every = self.config.trainer.checkpoint_every
        if every and self.steps % every == 0 and self.steps < self.config.trainer.steps:
            self.save_checkpoint()
        self.evaluate_if_due()

    def finish(self) -> None:
        """Show why the run ended early, evaluate, and save the last checkpoint."""
        if self._stopped is not None:
            self.observers.message(f"stopped after step {self.steps} of {self.config.trainer.steps}: {self._stopped}")
        if self._eval_tasks and not self._is_evaluated("eval_after"):
            self.evaluate(self._eval_tasks, "eval_after")
        self.save_checkpoint()
        self._keep_best()

    def _measure_change(self, rows: Sequence[Row]) -> None:
        """Record the new logprobs of what ``trainer.measure_change`` rollouts with a gradient sampled.

        The viewer shows them. Errors are logged once; the update is done.
        """
        trained = [row for row in rows if row.has_gradient]
        chosen = list(dict.fromkeys(row.rollout for row in trained))[: self.config.trainer.measure_change]
        rows = [row for row in trained if row.rollout in chosen]
        if not rows or not self._measures_change:
            return
        rollout_of = {segment.call: row.rollout for row in rows for segment in row.segments}
        try:
            after = self.learner.scorer(POLICY).logprobs(rows)
        except Exception as error:
            self._measures_change = False
            logger.warning(
                "trainer.measure_change: not measured from step %d on: %s. Set it to 0, or to fewer rollouts",
                *(self.steps, describe(error)),
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
            return
        arrays = {(rollout_of[call], call): pack(found, "<f4") for call, found in after.items()}
        self.store.add_arrays(LOGPROBS_AFTER, arrays)

    def evaluate(self, tasks: Sequence[Task], phase: Phase) -> Evaluation:
        """One pass over ``tasks`` with the current weights, ``eval.samples`` rollouts each.

        The rollouts of the run's own evaluations get their ``phase`` when all are recorded, in one transaction.
        """
        recorded: Phase = phase if phase == "eval_manual" else "eval_unfinished"
        self.observers.phase(phase, len(tasks) * self.config.eval.samples)
        groups = self._background.call(self._collector.roll_out_all, tasks, recorded, self.steps)
        self.store.change_phase(recorded, phase, self.steps)
        found = to_evaluation((str(g.task["id"]), r.status, r.reward) for g in groups for r in g.rollouts)
        self.observers.on_evaluation(self.steps, phase, found)
        return found

    def evaluate_if_due(self) -> None:
        """Evaluate if ``eval.every`` requires it after this step, unless it is recorded, and keep the best weights.

        In a run that is resumed past its end, the evaluation after its last step counts as this one.
        """
        steps, every = self.steps, self.config.eval.every
        if not self._eval_tasks or not every or steps % every or not 0 < steps < self.config.trainer.steps:
            return
        if not self._is_evaluated("eval") and not self.store.change_phase("eval_after", "eval", steps):
            self.evaluate(self._eval_tasks, "eval")
        self._keep_best()

    def _is_evaluated(self, phase: Phase) -> bool:
        """Whether a finished evaluation of the current weights is recorded."""
        return bool(self.store.rollouts(phase=phase, step=self.steps, last=1))

    def save_checkpoint(self) -> Path:
        """Write a checkpoint. Delete those beyond ``trainer.keep_checkpoints``, and the optimizer's state of the rest.

        The best one is kept.
        """
        folder = self._checkpoint
        if self._saved == self.steps and folder.exists():
            return folder
        self.learner.save(folder)
        self._saved = self.steps
        delete_old(self.folder, self.config.trainer.keep_checkpoints)
        return folder

    def _keep_best(self) -> None:
        """With ``trainer.keep_best``: keep the current weights if their evaluation is better than the kept weights'."""
        steps, kept = self.steps, best_checkpoint(self.folder)
        rewards = held_out_rewards(self.store, "eval", "eval_after")
        if not self.config.trainer.keep_best or steps not in rewards:
            return
        if kept is None or rewards[steps] > rewards.get(checkpoint_step(kept), -math.inf):
            if self._saved != steps or not self._checkpoint.exists():
                self.save_checkpoint()
            mark_best(self._checkpoint)
            delete_old(self.folder, self.config.trainer.keep_checkpoints)

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoints" / f"step-{self.steps:06d}"

    @contextmanager
    def saving_progress(self) -> Generator[None]:
        """Save a checkpoint if the body raises after updates that no checkpoint has.

        Nothing is saved if the weights may be in the middle of an update: after other errors than ours, or a second signal.
        """
        try:
            yield
        except (LightningError, Interrupted) as error:
            midway = isinstance(error, Interrupted) and error.midway
            if self.steps > self._saved and not midway:
                try:
                    self.save_checkpoint()
                except Exception:  # the error above is the one to report
                    logger.exception("no checkpoint could be saved after step %d", self.steps)
            raise


@contextmanager
def open_session(
    config: Config,
    solve: Solve,
    *,
    folder: Path,
    observers: Observers,
    reward_function: RewardFunction | None = None,
    checkpoint: Path | None = None,
    weights_only: bool = False,
    on_rollout: Callable[[Rollout], None] = lambda _: None,
) -> Generator[TrainingSession]:
    """Handle signals, install patches and integrations, load the weights, start the endpoint.

    At the end, all is undone in reverse order. ``weights_only``: load ``checkpoint`` to sample, not to train. ``on_rollout``: called
    with the last attempt at each job.
    """

    def advance(rollout: Rollout) -> None:
        on_rollout(rollout)
        observers.advance(rollout.trace)

    with ExitStack() as stack:
        stack.enter_context(interruptible())
        stack.enter_context(capturing(config))
        trainer = make_trainer(config)
        stack.callback(trainer.learner.close)
        _check_context(config, trainer.backend.max_context)
        for note in trainer.notes:
            observers.message(note)
        steps = 0 if checkpoint is None else trainer.learner.load(checkpoint, weights_only=weights_only)
        store = stack.enter_context(Store(folder / "store.db"))
        agents = stack.enter_context(
            open_agents(config, solve, trainer.backend, trainer.chats, reward_function=reward_function)
        )
        resources = Resources(
            config=config,
            store=store,
            agents=agents,
            chats=trainer.chats,
            max_context=trainer.backend.max_context,
            scorer=trainer.learner.scorer,
            critic=trainer.critic,
            vocabulary=trainer.vocabulary,
        )
        yield TrainingSession(
            collector=Collector(
                config,
                agents,
                store,
                signals=() if weights_only else open_signals(resources),
                on_rollout=advance,
                on_phase=observers.phase,
            ),
            background=stack.enter_context(background_loop()),
            learner=trainer.learner,
            notes=trainer.notes,
            steps=steps,
            store=store,
            observers=observers,
            folder=folder,
        )


def _check_context(config: Config, limit: int) -> None:
    """Raise `ConfigError` if a response of ``rollouts.max_tokens`` leaves no room for a prompt in the ``limit`` of the model."""
    if config.rollouts.max_tokens >= limit:
        raise ConfigError(
            f"rollouts.max_tokens is {config.rollouts.max_tokens}, but the model's context has {limit} tokens for prompt and response "
            "together; lower rollouts.max_tokens"
        )
