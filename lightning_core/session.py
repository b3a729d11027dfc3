"""An embedded run: weights, endpoint, agents and store, opened together.

`loop` is the algorithm that uses them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

from lightning_core.config import Config
from lightning_core.credit import Credit, Episode
from lightning_core.errors import ConfigError, LightningError, describe, plural
from lightning_core.observers.monitors import HeldOut
from lightning_core.observers.progress import Progress
from lightning_core.records.checkpoints import (
    best_checkpoint,
    checkpoint_step,
    delete_old,
    mark_best,
)
from lightning_core.records.held_out import held_out_by_task
from lightning_core.records.ledger import NewRoutes
from lightning_core.records.results import Evaluation, held_out_rewards, recorded_stop, to_evaluation
from lightning_core.records.steps import StepLog
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.attempt import Group, Rollout
from lightning_core.rollouts.background import BackgroundLoop, background_loop
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.counts import counts_to_metrics
from lightning_core.rollouts.interrupts import Interrupted, interruptible
from lightning_core.rollouts.local_agents import capturing, open_agents
from lightning_core.rollouts.refill import spare_tasks, without_gradient
from lightning_core.rollouts.runner import RewardFunction, Solve, Task
from lightning_core.rollouts.selection import require_transitions
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
        progress: Progress,
        folder: Path,
        on_evaluation: Callable[[int, Phase, Evaluation], None],
    ) -> None:
        """``steps``: the number of updates that ``learner`` has."""
        self.config = collector.config
        self.learner = learner
        self.notes = notes
        """See `Trainer.notes`."""
        self.steps = steps
        """Number of updates so far."""
        self.store = store
        self.progress = progress
        self.folder = folder
        self._collector = collector
        self._background = background
        self._on_evaluation = on_evaluation
        self._saved = steps
        """Number of updates in the newest checkpoint."""
        self._measures_change = True
        self._held_out: HeldOut | None = None
        """The rewards of the recorded evaluations; None: not read."""

    def open_log(self) -> StepLog:
        """The log of the steps after the loaded checkpoint. What was recorded after it is dropped."""
        return StepLog(
            self.config,
            self.folder,
            self.store,
            self.progress,
            after=self.steps,
            held_out=self._read_held_out,
        )

    def _read_held_out(self) -> HeldOut:
        if self._held_out is None:
            self._held_out = held_out_by_task(self.store)
        return self._held_out

    def pick_tasks(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """The tasks of the next step."""
        return self._collector.pick_tasks(tasks, self.steps)

    def roll_out(self, tasks: Sequence[Task], *, whole: bool = True) -> Sequence[Group]:
        """tasks → rollouts: a group of attempts at each task. ``whole``: they are all groups of the step."""
        self.progress.phase("train", len(tasks) * self.config.rollouts.group_size)
        return self._background.call(self._collector.roll_out_all, tasks, "train", self.steps, whole=whole)

    def annotate(self, groups: Sequence[Group]) -> Sequence[Episode]:
        """rollouts → transitions and rewards: the episodes that can be trained on, with what signals add."""
        require_transitions(groups, self._collector.episodes(groups))
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

    def update(
        self,
        groups: Sequence[Group],
        episodes: Sequence[Episode],
        credit: Credit,
        rows: Sequence[Row],
        streams: Streams,
    ) -> Mapping[str, float]:
        """rows → new weights, of the policy and of the signals. Returns the metrics of the step."""
        self.progress.phase("update")
        replaced = len(groups) - self.config.rollouts.tasks_per_step
        counts = self._collector.count(groups, episodes, credit, rows, streams, replaced=replaced)
        if not rows:
            logger.warning(
                "step %d: nothing to train on: all %d responses of the trained agents reached their token limit, and "
                "algorithm.truncated is mask; raise rollouts.max_tokens, or use truncated: train",
                *(self.steps + 1, counts["calls_truncated"]),
            )
        self._collector.record_credit(episodes, credit, self.steps)
        metrics = {**counts_to_metrics(counts), **self.learner.step(rows), **self._collector.fit(credit)}
        self.steps += 1
        return metrics

    def measure_change(self, rows: Sequence[Row]) -> None:
        """After the update: record the new logprobs of what ``trainer.measure_change`` rollouts with a gradient sampled.

        The viewer shows them. What goes wrong is logged once; the update is done.
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
        self.progress.phase(phase, len(tasks) * self.config.eval.samples)
        groups = self._background.call(self._collector.roll_out_all, tasks, recorded, self.steps)
        self.store.change_phase(recorded, phase, self.steps)
        self._held_out = None
        found = to_evaluation((str(g.task["id"]), r.status, r.reward) for g in groups for r in g.rollouts)
        if phase != "eval_manual" and found.reward is not None:
            self.progress.message(f"held-out reward after {plural(self.steps, 'step')}: {found.reward:.3f}")
        self._on_evaluation(self.steps, phase, found)
        return found

    def evaluate_if_due(self, tasks: Sequence[Task]) -> bool:
        """Whether ``eval.every`` requires an evaluation after this step. Run it unless it is recorded, then `keep_best`.

        In a run that is resumed past its end, the evaluation after its last step counts as this one.
        """
        steps, every = self.steps, self.config.eval.every
        if not tasks or not every or steps % every or not 0 < steps < self.config.trainer.steps:
            return False
        if not self.is_evaluated("eval") and not self.store.change_phase("eval_after", "eval", steps):
            self.evaluate(tasks, "eval")
        self.keep_best()
        return True

    def is_evaluated(self, phase: Phase) -> bool:
        """Whether a finished evaluation of the current weights is recorded."""
        return bool(self.store.rollouts(phase=phase, step=self.steps, last=1))

    def save_checkpoint(self) -> Path:
        """Write a checkpoint. Delete those beyond ``trainer.keep_checkpoints``, and the optimiser's state of the rest.

        The best one is kept.
        """
        folder = self._checkpoint
        if self._saved == self.steps and folder.exists():
            return folder
        self.learner.save(folder)
        self._saved = self.steps
        delete_old(self.folder, self.config.trainer.keep_checkpoints)
        return folder

    def keep_best(self) -> None:
        """With ``trainer.keep_best``: keep the current weights if their evaluation is better than that of the kept ones."""
        steps, kept = self.steps, best_checkpoint(self.folder)
        rewards = held_out_rewards(self.store, "eval", "eval_after")
        if not self.config.trainer.keep_best or steps not in rewards:
            return
        if kept is None or rewards[steps] > rewards.get(checkpoint_step(kept), -math.inf):
            if self._saved != steps or not self._checkpoint.exists():
                self.save_checkpoint()
            mark_best(self._checkpoint)
            delete_old(self.folder, self.config.trainer.keep_checkpoints)

    def stop_reason(self) -> str | None:
        """Why the run ends early; None if it goes on. See `recorded_stop`."""
        return recorded_stop(self.config, self.store)

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
    progress: Progress,
    reward_function: RewardFunction | None = None,
    checkpoint: Path | None = None,
    weights_only: bool = False,
    on_rollout: Callable[[Rollout], None] = lambda _: None,
    on_evaluation: Callable[[int, Phase, Evaluation], None] = lambda step, phase, evaluation: None,
) -> Generator[TrainingSession]:
    """Handle signals, install patches and integrations, load the weights, start the endpoint.

    At the end, all is undone in reverse order. ``weights_only``: load ``checkpoint`` to sample, not to train. ``on_rollout``: called
    with the last attempt at each job. ``on_evaluation``: called after each evaluation with the number of updates before it.
    """

    new_routes = NewRoutes()

    def advance(rollout: Rollout) -> None:
        if routing := new_routes.of(rollout.trace):
            progress.message(routing)
        on_rollout(rollout)
        progress.advance(1, sum(len(c.output_ids) for c in rollout.trace.calls if c.output_ids is not None))

    with ExitStack() as stack:
        stack.enter_context(interruptible())
        stack.enter_context(capturing(config))
        trainer = make_trainer(config)
        stack.callback(trainer.learner.close)
        _check_context(config, trainer.backend.max_context)
        for note in trainer.notes:
            progress.message(note)
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
                on_phase=progress.phase,
            ),
            background=stack.enter_context(background_loop()),
            learner=trainer.learner,
            notes=trainer.notes,
            steps=steps,
            store=store,
            progress=progress,
            folder=folder,
            on_evaluation=on_evaluation,
        )


def _check_context(config: Config, limit: int) -> None:
    """Raise `ConfigError` if a response of ``rollouts.max_tokens`` leaves no room for a prompt in the ``limit`` of the model."""
    if config.rollouts.max_tokens >= limit:
        raise ConfigError(
            f"rollouts.max_tokens is {config.rollouts.max_tokens}, but the model's context has {limit} tokens for prompt and response "
            "together; lower rollouts.max_tokens"
        )
