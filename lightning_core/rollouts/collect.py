"""Collects the data of an update: tasks → rollouts → transitions → advantages → rows.

Both trainers use this code. The embedded loop collects a whole step; verl's agent-loop manager calls the methods of `Collector` group by
group, as verl requests groups.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from lightning_core.config import Config
from lightning_core.config.build_rules import policy_rules
from lightning_core.credit import Credit, Episode, assign_by_policy
from lightning_core.errors import InfrastructureError
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.abort_checks import AbortChecks
from lightning_core.rollouts.attempt import AgentPool, Attempt, Group, Job, Rollout, Task
from lightning_core.rollouts.counts import add_counts, count_batch, count_groups
from lightning_core.rollouts.jobs import call_credits, count_earlier, make_jobs, pick_tasks, rollout_record, to_episodes
from lightning_core.rollouts.selection import require_transitions, routing_of, trained_agents
from lightning_core.rollouts.signal import Reject, Signal, checked_streams, merge_streams
from lightning_core.transitions import Row, Streams

logger = logging.getLogger(__name__)


class Collector:
    """Runs groups of attempts, records them, and turns them into episodes with credit."""

    def __init__(
        self,
        config: Config,
        agents: AgentPool,
        store: Store,
        *,
        signals: Sequence[Signal] = (),
        on_rollout: Callable[[Rollout], None] = lambda _: None,
        on_phase: Callable[[str], None] = lambda _: None,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_rollout``: called with the last attempt at each job that no signal added. ``on_phase``: with the phase of a signal.
        ``on_batch``: before the rollouts of a step or an evaluation."""
        self.config = config
        self.rules = policy_rules(config)
        self._agents = agents
        self._store = store
        self._signals = signals
        self._on_rollout = on_rollout
        self._on_phase = on_phase
        self._on_batch = on_batch
        self._checks = AbortChecks(config)

    def pick_tasks(self, tasks: Sequence[Task], step: int) -> Sequence[Task]:
        """The tasks of ``step``, chosen by the first signal that chooses, or else in order of a shuffled list."""
        picked = (signal.pick_tasks(tasks, step) for signal in self._signals)
        return next((found for found in picked if found is not None), None) or pick_tasks(tasks, self.config, step)

    async def roll_out(self, task: Task, phase: Phase, step: int, *, earlier: int = 0) -> Group:
        """tasks → rollouts: run all attempts at ``task`` under the current policy; recorded on return.

        ``earlier``: number of groups of the same task before this one in the step (`count_earlier`).
        """
        c = self.config
        copies = c.rollouts.group_size if phase == "train" else c.eval.samples
        jobs = make_jobs(task, c, copies=copies, phase=phase, step=step, earlier=earlier)
        signals = self._signals if phase == "train" else ()
        for signal in signals:
            jobs = [signal.prepare(job) for job in jobs]
        try:
            rollouts = [rollout for rollout, _ in await self._run(step, jobs, phase)]
        except InfrastructureError as error:
            logger.error("task %r: %d rollouts are left out: %s", task["id"], len(jobs), error)
            return Group(task=task, step=step, rollouts=(), lost=len(jobs), error=str(error))
        group = Group(task=task, step=step, rollouts=rollouts)
        for signal in signals:
            group = await signal.extend(group, partial(self._run, step))
        return group

    async def _run(
        self, step: int, jobs: Sequence[Job], phase: Phase, reject: Reject = lambda _: None
    ) -> Sequence[tuple[Rollout, str | None]]:
        """The last attempt at each of ``jobs``, with the reason why ``reject`` refuses it; all attempts are recorded on return."""
        version = None if self.config.policies else step
        writes: list[Future[None]] = []
        rejected: dict[str, str | None] = {}

        def record(attempts: Sequence[Attempt]) -> None:
            rollouts = [attempt.rollout for attempt in attempts]
            rejected.update({r.trace.rollout: reject(r) for r in rollouts})
            new = [attempt.rollout for attempt in attempts if not attempt.is_recorded]
            records = [
                (rollout_record(r, step, phase, version, rejected=rejected[r.trace.rollout]), r.spans) for r in new
            ]
            writes.append(self._store.queue_rollouts(records))
            for rollout in (attempt.rollout for attempt in attempts if attempt.final):
                self._checks.count(rollout)
                if rollout.job.recorded is None:
                    self._on_rollout(rollout)

        try:
            found = await self._agents.roll_out(jobs, routing_of(self.config, phase), record)
        finally:
            await asyncio.gather(
                *(asyncio.wrap_future(write) for write in writes if not write.done() or write.exception())
            )
        return [(rollout, rejected[rollout.trace.rollout]) for rollout in found]

    async def roll_out_all(self, tasks: Sequence[Task], phase: Phase, step: int, *, whole: bool = True) -> list[Group]:
        """Run one group for each task, all concurrently.

        ``whole``: they are all groups of a step or an evaluation. See `check`.
        """
        self._on_batch()
        try:
            async with asyncio.TaskGroup() as running:
                groups = [
                    running.create_task(self.roll_out(task, phase, step, earlier=earlier))
                    for task, earlier in zip(tasks, count_earlier(tasks), strict=True)
                ]
        except BaseExceptionGroup as raised:
            raise raised.exceptions[0] from None
        found = [group.result() for group in groups]
        self.check(found, whole=whole, measured=phase == "eval_manual")
        return found

    def check(self, groups: Sequence[Group], *, whole: bool = True, measured: bool = False) -> None:
        """Raise an error for groups that stop the run; see `AbortChecks.check` and `Signal.check`."""
        self._checks.check(groups, whole=whole, measured=measured)
        for signal in self._signals:
            signal.check(groups)

    def episodes(self, groups: Sequence[Group], *, required: bool = False) -> list[Episode]:
        """rollouts → transitions: the rollouts that can be trained on.

        ``required``: raise `TrainingError` if no episode has a call to train.
        """
        rollouts = [r for g in groups for r in g.trained]
        episodes = to_episodes(rollouts, trained_agents(self.config, (r.trace for r in rollouts)))
        if required:
            require_transitions(groups, episodes)
        return episodes

    async def annotate(self, groups: Sequence[Group], step: int, *, required: bool) -> Sequence[Episode]:
        """The episodes of ``groups`` with the rewards and facts that signals add.

        ``required``: see `episodes` and `Signal.annotate`.
        """
        episodes: Sequence[Episode] = self.episodes(groups, required=required)
        tasks = {str(g.task["id"]): g.task for g in groups}
        for signal in self._signals:
            if signal.phase is not None:
                self._on_phase(signal.phase)
            episodes = await signal.annotate(episodes, tasks, step, required=required)
        return episodes

    def credit(self, episodes: Sequence[Episode]) -> Credit:
        """transitions → advantages: each call's value and advantage by the rules of its policy."""
        return assign_by_policy(episodes, self.rules)

    def streams(self, episodes: Sequence[Episode]) -> Streams:
        """The terms of the loss for single tokens, of all signals."""
        return merge_streams([checked_streams(signal, episodes) for signal in self._signals])

    def fit(self, credit: Credit) -> Mapping[str, float]:
        """Update what the signals learn themselves, after the policy. Returns metrics."""
        return {name: value for signal in self._signals for name, value in signal.fit(credit).items()}

    def count(
        self,
        groups: Sequence[Group],
        episodes: Sequence[Episode],
        credit: Credit,
        rows: Sequence[Row],
        streams: Streams,
        *,
        replaced: int = 0,
    ) -> Mapping[str, float]:
        """The counts of a step or a part of it.

        ``groups``: all that ran, including ``replaced`` groups; the other counts exclude these.
        """
        rollouts = count_groups(groups, solved=self.config.eval.solved)
        if silent := rollouts["rollouts_without_calls"]:
            logger.warning("in %d of %d rollouts no trained agent made a model call", silent, rollouts["rollouts"])
        counts = rollouts | {"groups_refilled": replaced}
        counts |= count_batch(self.config, episodes, credit, rows, groups[0].step)
        for own in (streams.counts, *(signal.counts() for signal in self._signals)):
            counts = add_counts(counts, own)
        return counts

    def record_credit(self, episodes: Sequence[Episode], credit: Credit, step: int) -> None:
        """Record the credit of each call."""
        self._store.add_credit(call_credits(episodes, credit, step))
