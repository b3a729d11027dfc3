"""Collects what one update is made from: tasks → rollouts → traces → transitions → advantages → rows.

The same code serves every trainer. The embedded loop collects a whole step (`collect`); verl's agent-loop manager uses the parts of
`Collector` group by group, as verl requests them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from anyio.from_thread import BlockingPortal

from lightning_core.config import Config
from lightning_core.config.credit_rules import policy_rules
from lightning_core.credit import Credit, Episode, assign_by_policy
from lightning_core.endpoint.server import Routing
from lightning_core.errors import InfrastructureError, TrainingError
from lightning_core.records.progress import Progress
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.counts import count_rollouts, count_rows
from lightning_core.rollouts.entries import (
    call_credits,
    check_names,
    make_jobs,
    pick_tasks,
    rollout_record,
    routing_of,
    to_episodes,
    trained_agents,
)
from lightning_core.rollouts.judge import Judged, reward_spans, with_scores
from lightning_core.rollouts.runner import Attempt, Job, Rollout, Task
from lightning_core.transitions import Row, Transition, transitions_to_rows

logger = logging.getLogger(__name__)

Record = Callable[[Sequence[Attempt]], None]
Values = Callable[[Sequence[Transition]], Mapping[str, float]]
"""A critic: the expected return at each call's prompt, by call id."""


class AgentPool(Protocol):
    """Runs agents and the judge: in this process, or on the workers of a cluster."""

    async def roll_out(self, jobs: Sequence[Job], routing: Routing, record: Record) -> Sequence[Rollout]:
        """The last attempt at each job; ``record`` is called with every attempt, singly or with several.

        Raises `InfrastructureError` if the worker that ran them is lost, and `RewardError` for a reward that is not usable.
        """
        ...

    async def judge(self, episodes: Sequence[Episode], step: int) -> Judged:
        """The judge's scores for one group. Raises `InfrastructureError` if its worker is lost."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The attempts at one task, all of them finished."""

    task: Task
    step: int
    """Updates before these rollouts."""
    rollouts: Sequence[Rollout]
    """The last attempt of each."""
    lost: int = 0
    """Attempts without a rollout: their worker was lost."""
    error: str | None = None
    """How the worker was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Episodes with credit, and the rows to train on."""

    episodes: Sequence[Episode]
    credit: Credit
    rows: Sequence[Row]
    counts: Mapping[str, float]
    """Sums (`counts`); those of a step's batches add up."""


class Collector:
    """Runs groups of attempts, records them, and turns them into batches."""

    def __init__(
        self,
        config: Config,
        agents: AgentPool,
        store: Store,
        *,
        values: Values | None = None,
        on_rollout: Callable[[Rollout], None] = lambda _: None,
    ) -> None:
        """``values``: the critic, where a reward rule needs one. ``on_rollout``: called with the last attempt at each job."""
        self.config = config
        self.rules = policy_rules(config)
        self._agents = agents
        self._store = store
        self._values = values
        self._on_rollout = on_rollout
        self._checked = False

    async def roll_out(self, task: Task, phase: Phase, step: int) -> Group:
        """tasks → rollouts: all attempts at ``task`` under the current policy. Every attempt is on disk on return."""
        c = self.config
        copies = c.rollouts.group_size if phase == "train" else c.eval.samples
        jobs = make_jobs([task], c, copies=copies, phase=phase, step=step)
        version = None if c.policies else step

        writes: list[Future[None]] = []

        def record(attempts: Sequence[Attempt]) -> None:
            records = [(rollout_record(a.rollout, step, phase, version), a.rollout.spans) for a in attempts]
            writes.append(self._store.queue_rollouts(records))
            for attempt in attempts:
                if attempt.final:
                    self._on_rollout(attempt.rollout)

        try:
            rollouts = await self._agents.roll_out(jobs, routing_of(c, trained_agents(c), phase), record)
        except InfrastructureError as error:
            logger.error("task %r: %d rollouts are left out: %s", task["id"], len(jobs), error)
            return Group(task=task, step=step, rollouts=(), lost=len(jobs), error=str(error))
        finally:
            await asyncio.gather(*map(asyncio.wrap_future, writes))
        return Group(task=task, step=step, rollouts=rollouts)

    async def roll_out_all(self, tasks: Sequence[Task], phase: Phase, step: int) -> list[Group]:
        """A group for each task, all at the same time. Raises `InfrastructureError` if no rollout finished."""
        try:
            async with asyncio.TaskGroup() as running:
                groups = [running.create_task(self.roll_out(task, phase, step)) for task in tasks]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        found = [group.result() for group in groups]
        self.check(found)
        return found

    def check(self, groups: Sequence[Group]) -> None:
        """Raise `InfrastructureError` if no rollout finished, and for the first groups `ConfigError` for unknown agents."""
        rollouts = [r for g in groups for r in g.rollouts]
        if all(r.status == "infrastructure" for r in rollouts):
            errors = [e for e in (*(g.error for g in groups), *(r.error for r in rollouts)) if e]
            count = len(rollouts) + sum(g.lost for g in groups)
            raise InfrastructureError(
                f"all {count} rollouts failed for reasons of infrastructure; the first: {errors[0]}"
            )
        if not self._checked:
            check_names(self.config, rollouts)
            self._checked = True

    async def episodes(self, groups: Sequence[Group]) -> list[Episode]:
        """rollouts → transitions: what can be trained on, with the judge's scores among the rewards if there is a judge."""
        by_group = [to_episodes(g.rollouts, trained_agents(self.config)) for g in groups]
        everything = [episode for episodes in by_group for episode in episodes]
        if self.config.credit.judge is None:
            return everything
        comparable = [(e, g.step) for e, g in zip(by_group, groups, strict=True) if len(e) > 1]
        outcomes = await asyncio.gather(*(self._judge(episodes, step) for episodes, step in comparable))
        failures = [outcome for outcome in outcomes if isinstance(outcome, InfrastructureError)]
        if len(groups) > 1 and failures and len(failures) == len(outcomes):
            raise InfrastructureError(
                f"the judge {self.config.credit.judge.model!r} scored none of {len(outcomes)} groups; the first error: {failures[0]}"
            )
        for failure in failures:
            logger.warning("a group goes without the judge's scores: %s", failure)
        scores = {k: v for found in outcomes if not isinstance(found, Exception) for k, v in found.items()}
        return with_scores(everything, scores)

    async def _judge(self, episodes: Sequence[Episode], step: int) -> Mapping[str, float] | InfrastructureError:
        try:
            judged = await self._agents.judge(episodes, step)
        except InfrastructureError as error:
            return error
        await asyncio.to_thread(self._store.add_rollouts, judged.records)
        if judged.error is not None:
            return InfrastructureError(judged.error)
        await asyncio.to_thread(self._store.add_spans, reward_spans(episodes, judged.scores))
        return judged.scores

    def credit(self, episodes: Sequence[Episode]) -> Credit:
        """transitions → advantages: each call's value and advantage by its policy's rules."""
        asked = [t for e in episodes for t in e.transitions if self.rules[t.policy].needs_values]
        if asked and self._values is None:
            raise TrainingError("credit.rewards needs a critic, and this trainer has none")
        return assign_by_policy(episodes, self.rules, values=self._values(asked) if asked and self._values else None)

    def batch(
        self, groups: Sequence[Group], episodes: Sequence[Episode], credit: Credit, *, replaced: int = 0
    ) -> Batch:
        """advantages → rows. ``groups``: all that ran, also the ``replaced`` ones, which ``episodes`` do not contain."""
        rows = [row for e in episodes for row in transitions_to_rows(e.transitions, credit.advantages)]
        rollouts = count_rollouts([r for g in groups for r in g.rollouts], lost=sum(g.lost for g in groups))
        counts = {**rollouts, "groups_refilled": replaced, **count_rows(rows), **credit.metrics}
        return Batch(episodes=episodes, credit=credit, rows=rows, counts=counts)

    def record_credit(self, batch: Batch, step: int) -> None:
        """Record what each call was credited with."""
        self._store.add_credit(call_credits(batch.episodes, batch.credit, step))


def collect(
    collector: Collector, portal: BlockingPortal, tasks: Sequence[Task], *, step: int, progress: Progress
) -> Batch:
    """The batch of one step: a group of attempts at each of its tasks, and their credit.

    A group whose every advantage is 0 has no gradient: its attempts earned the same. With ``rollouts.refill`` other tasks are tried
    instead of such groups, up to that many a step (dynamic sampling, DAPO, arXiv 2503.14476); those that remain when the budget is spent
    stay in the batch, and count where the loss takes means. Agents run on the event loop of ``portal``, credit in this thread.
    """
    config = collector.config

    def roll_out(tasks: Sequence[Task]) -> tuple[list[Group], list[Episode]]:
        progress.phase("train", len(tasks) * config.rollouts.group_size)
        groups = portal.call(collector.roll_out_all, tasks, "train", step)
        if config.credit.judge is not None:
            progress.phase("judge")
        return groups, portal.call(collector.episodes, groups)

    chosen = pick_tasks(tasks, config, step)
    groups, episodes = roll_out(chosen)
    require_transitions(groups, episodes)
    credit = collector.credit(episodes)

    spare = spare_tasks(tasks, chosen, seed=f"{config.run.seed}:{step}")
    replaced = 0
    while replaced < config.rollouts.refill:
        flat = without_signal(episodes, credit)
        others = list(islice(spare, min(len(flat), config.rollouts.refill - replaced)))
        if not others:
            break
        replaced += len(others)
        more, fresh = roll_out(others)
        groups += more
        dropped = set(flat[: len(others)])
        episodes = [*(e for e in episodes if e.task_id not in dropped), *fresh]
        credit = collector.credit(episodes)
    return collector.batch(groups, episodes, credit, replaced=replaced)


def require_transitions(groups: Sequence[Group], episodes: Sequence[Episode]) -> None:
    """Raise `TrainingError` if there is nothing to train on."""
    if not any(e.transitions for e in episodes):
        rollouts = [r for g in groups for r in g.rollouts]
        error = next((f"; the first error: {r.error}" for r in rollouts if r.error), "")
        raise TrainingError(f"no trained agent made a call in {len(rollouts)} rollouts{error}")


def without_signal(episodes: Sequence[Episode], credit: Credit) -> list[str]:
    """The ids of the tasks all of whose advantages are 0."""
    signal: dict[str, bool] = {}
    for e in episodes:
        found = any(credit.advantages[t.call] for t in e.transitions)
        signal[e.task_id] = signal.get(e.task_id, False) or found
    return [task for task, found in signal.items() if not found]


def spare_tasks(tasks: Sequence[Task], chosen: Sequence[Task], *, seed: str) -> Iterator[Task]:
    """The tasks that are not in ``chosen``, in an order that ``seed`` decides."""
    taken = {t["id"] for t in chosen}
    others = [t for t in tasks if t["id"] not in taken]
    yield from random.Random(f"{seed}:spare").sample(others, len(others))
