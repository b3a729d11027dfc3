"""Collects the data of an update: tasks → rollouts → transitions → advantages → rows.

Both trainers use this code. The embedded trainer collects a whole step (`collect`). verl's agent-loop manager calls the methods of
`Collector` group by group, as verl requests groups.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice

from lightning_core.config import Config
from lightning_core.config.build_rules import policy_rules
from lightning_core.config.forks import Forks
from lightning_core.credit import Credit, Episode, assign_by_policy
from lightning_core.errors import ConfigError, InfrastructureError, TrainingError
from lightning_core.records.observer import Observers
from lightning_core.records.store import Phase, Store
from lightning_core.records.task_history import Tried, recent_attempts
from lightning_core.rollouts.abort_checks import InvalidRewards, check_finished, check_rewarded
from lightning_core.rollouts.agent_pool import AgentPool
from lightning_core.rollouts.answers import AnswerScorer, ScoredEpisodes
from lightning_core.rollouts.attempt import Attempt, Job, Rollout
from lightning_core.rollouts.background import BackgroundLoop
from lightning_core.rollouts.batch import Batch, Group
from lightning_core.rollouts.counts import add_counts, count_batch, count_ce, count_groups, count_taught, tokens_of_fork
from lightning_core.rollouts.curriculum import count_picked
from lightning_core.rollouts.failure_log import FailureLog
from lightning_core.rollouts.jobs import (
    call_credits,
    check_tools_of,
    count_earlier,
    fork_jobs,
    make_jobs,
    pick_tasks,
    rollout_record,
    to_episodes,
)
from lightning_core.rollouts.judged import judge_episodes
from lightning_core.rollouts.refill import spare_tasks, without_signal
from lightning_core.rollouts.rows import episode_rows
from lightning_core.rollouts.runner import Task
from lightning_core.rollouts.selection import check_agents, require_transitions, routing_of, trained_agents
from lightning_core.rollouts.supervision import Supervision, SupervisionSources
from lightning_core.trace import ANSWER_LOGPROBS
from lightning_core.transitions import Transition

logger = logging.getLogger(__name__)

Values = Callable[[Sequence[Transition]], Mapping[str, float]]
"""A critic: the expected return at each call's prompt, by call id."""


class Collector:
    """Runs groups of attempts, records them, and turns them into batches."""

    def __init__(
        self,
        config: Config,
        agents: AgentPool,
        store: Store,
        *,
        values: Values | None = None,
        sources: SupervisionSources | None = None,
        answers: AnswerScorer | None = None,
        on_rollout: Callable[[Rollout], None] = lambda _: None,
    ) -> None:
        """``values``: the critic, if a reward rule needs one. ``sources``: of supervision. ``answers``: those of
        ``credit.information_gain``.

        ``on_rollout``: called with the last attempt at each job.
        """
        self.config = config
        self.rules = policy_rules(config)
        self._agents = agents
        self._store = store
        self._values = values
        self._sources = sources or SupervisionSources()
        self._answers = answers
        self._on_rollout = on_rollout
        self._failures = FailureLog()
        self._names_checked = False
        self._tools_checked = False
        self._invalid = InvalidRewards(config.rollouts.max_invalid)

    def tried(self, step: int) -> Mapping[str, Tried] | None:
        """With ``tasks.sampling: curriculum``: recent attempts at each task before ``step``; from the store, as in a resumed run."""
        uniform = self.config.tasks.sampling == "uniform"
        return None if uniform else recent_attempts(self._store, before=step, solved=self.config.eval.solved)

    async def roll_out(self, task: Task, phase: Phase, step: int, *, earlier: int = 0) -> Group:
        """tasks → rollouts: run all attempts at ``task`` under the current policy; recorded on return.

        ``earlier``: number of groups of the same task before this one in the step (`count_earlier`).
        """
        c = self.config
        copies = c.rollouts.group_size if phase == "train" else c.eval.samples
        jobs = make_jobs(task, c, copies=copies, phase=phase, step=step, earlier=earlier)
        try:
            rollouts = await self._run(jobs, phase, step)
        except InfrastructureError as error:
            logger.error("task %r: %d rollouts are left out: %s", task["id"], len(jobs), error)
            return Group(task=task, step=step, rollouts=(), lost=len(jobs), error=str(error))
        group = Group(task=task, step=step, rollouts=rollouts)
        return group if phase != "train" or c.rollouts.forks is None else await self._fork(group, c.rollouts.forks)

    async def _run(self, jobs: Sequence[Job], phase: Phase, step: int) -> Sequence[Rollout]:
        """The last attempt at each of ``jobs``; all attempts are recorded on return."""
        version = None if self.config.policies else step
        writes: list[Future[None]] = []

        def record(attempts: Sequence[Attempt]) -> None:
            records = [(rollout_record(a.rollout, step, phase, version), a.rollout.spans) for a in attempts]
            writes.append(self._store.queue_rollouts(records))
            for rollout in (attempt.rollout for attempt in attempts if attempt.final):
                self._invalid.count(rollout)
                if phase != "fork":
                    self._on_rollout(rollout)

        try:
            return await self._agents.roll_out(jobs, routing_of(self.config, phase), record)
        finally:
            await asyncio.gather(*map(asyncio.wrap_future, writes))

    async def _fork(self, group: Group, settings: Forks) -> Group:
        """``group`` with forks of its attempts."""
        for attempt in group.rollouts:
            self._failures.not_kept(attempt)
        agents = trained_agents(self.config, (r.trace for r in group.rollouts))
        if not (jobs := fork_jobs(group.rollouts, settings, agents)):
            self._failures.over_limit(group.rollouts, settings, agents)
            return group
        try:
            forks = await self._run(jobs, "fork", group.step)
        except InfrastructureError as error:
            logger.error("task %r: %d forks are left out: %s", group.task["id"], len(jobs), error)
            return replace(group, forks_dropped=len(jobs))
        for fork in forks:
            self._failures.dropped(fork)
        whole = [fork for fork in forks if fork.dropped is None]
        tokens = sum(tokens_of_fork(fork) for fork in forks if fork.dropped is not None)
        return replace(group, forks=whole, forks_dropped=len(jobs) - len(whole), tokens_dropped=tokens)

    async def roll_out_all(self, tasks: Sequence[Task], phase: Phase, step: int, *, whole: bool = True) -> list[Group]:
        """Run one group for each task, all concurrently.

        ``whole``: they are all groups of a step or an evaluation. See `check`.
        """
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
        """Raise an error if no rollout finished or, if ``whole``, none has a reward; at first also for unknown agents and tools
        (``measured``: see `check_agents`)."""
        if not groups:
            raise ConfigError("found no tasks to run, expected at least one; check the list of tasks")
        rollouts = [r for g in groups for r in g.rollouts]
        lost = [g.error or "" for g in groups for _ in range(g.lost)]
        check_finished(rollouts, lost)
        if not self._names_checked:
            check_agents(self.config, rollouts, measured=measured)
            self._names_checked = True
        self._tools_checked = self._tools_checked or check_tools_of(rollouts)
        if whole:
            check_rewarded(rollouts, lost)

    def episodes(self, groups: Sequence[Group]) -> list[Episode]:
        """rollouts → transitions: the rollouts that can be trained on."""
        rollouts = [r for g in groups for r in g.trained]
        return to_episodes(rollouts, trained_agents(self.config, (r.trace for r in rollouts)))

    async def judged(self, episodes: Sequence[Episode], step: int, *, required: bool) -> list[Episode]:
        """``episodes`` with the judge's scores among their rewards, if a judge is configured (`judge_episodes`)."""
        judge = self.config.credit.judge
        if judge is None:
            return list(episodes)
        return await judge_episodes(judge, self._agents, self._store, episodes, step, required=required)

    def score_answers(self, groups: Sequence[Group], episodes: Sequence[Episode]) -> ScoredEpisodes:
        """``episodes`` with the logprobs of the answers of their tasks, if ``credit.information_gain`` is set; recorded on return."""
        if self._answers is None:
            return ScoredEpisodes(episodes=episodes)
        policies = {name for name, rules in self.rules.items() if rules.reward_rule.answer}
        found = self._answers.score(episodes, {str(g.task["id"]): g.task for g in groups}, policies)
        self._store.add_arrays(ANSWER_LOGPROBS, found.arrays())
        return found

    def credit(self, episodes: Sequence[Episode]) -> Credit:
        """transitions → advantages: each call's value and advantage by the rules of its policy."""
        scored = [t for e in episodes for t in e.transitions if self.rules[t.policy].needs_values]
        if scored and self._values is None:
            raise TrainingError("credit.rewards needs a critic, but this trainer has no critic")
        values = self._values(scored) if scored and self._values is not None else None
        return assign_by_policy(episodes, self.rules, values=values)

    def supervision(self, episodes: Sequence[Episode]) -> Supervision:
        """What the calls of ``episodes`` learn besides their rewards; the teacher is asked."""
        return self._sources.supervision(self.config.algorithm, episodes)

    def batch(
        self,
        groups: Sequence[Group],
        episodes: Sequence[Episode],
        credit: Credit,
        supervision: Supervision | None = None,
        *,
        replaced: int = 0,
        counts: Mapping[str, float] | None = None,
    ) -> Batch:
        """advantages → rows.

        ``groups``: all that ran, including the ``replaced`` ones; ``episodes``: without those. ``counts``: others of the step.
        """
        c, supervision = self.config, supervision or Supervision()
        rows = [row for e in episodes for row in episode_rows(c.algorithm, e, credit, supervision)]
        rollouts = count_groups(groups, solved=c.eval.solved)
        if silent := rollouts["rollouts_without_calls"]:
            logger.warning("in %d of %d rollouts no trained agent made a model call", silent, rollouts["rollouts"])
        counts = {
            **(counts or {}),
            **rollouts,
            "groups_refilled": replaced,
            **count_batch(c, episodes, credit, rows, groups[0].step),
            **count_taught(supervision.lessons.differences, supervision.lessons.candidates),
            **(count_ce(rows, supervision.targets.unknown) if c.algorithm.ce else {}),
        }
        return Batch(episodes=episodes, credit=credit, rows=rows, counts=counts)

    def record_credit(self, batch: Batch, step: int) -> None:
        """Record the credit of each call."""
        self._store.add_credit(call_credits(batch.episodes, batch.credit, step))


def collect(
    collector: Collector, background: BackgroundLoop, tasks: Sequence[Task], *, step: int, progress: Observers
) -> Batch:
    """The batch of one step: a group of attempts at each of its tasks, with credit.

    A group has no gradient if all its advantages are 0, because its attempts earned the same. With ``rollouts.refill``, up to that
    many such groups per step are replaced by groups of other tasks (dynamic sampling, DAPO, arXiv 2503.14476). Groups that remain
    when the budget is spent stay in the batch and count in the means of the loss. Agents run on ``background``, credit in the
    calling thread.
    """
    config = collector.config
    scored: dict[str, float] = {}

    def roll_out(tasks: Sequence[Task], *, whole: bool) -> tuple[list[Group], list[Episode]]:
        progress.phase("train", len(tasks) * config.rollouts.group_size)
        groups = background.call(collector.roll_out_all, tasks, "train", step, whole=whole)
        episodes = collector.episodes(groups)
        require_transitions(groups, episodes)
        found = collector.score_answers(groups, episodes)
        scored.update(add_counts(scored, found.counts))
        if config.credit.judge is None:
            return groups, list(found.episodes)
        progress.phase("judge")
        return groups, background.call(collector.judged, found.episodes, step, required=True)

    tried = collector.tried(step)
    chosen = pick_tasks(tasks, config, step, tried)
    groups, episodes = roll_out(chosen, whole=True)
    credit = collector.credit(episodes)

    spare = spare_tasks(tasks, chosen, seed=f"{config.run.seed}:{step}")
    replaced = 0
    while replaced < config.rollouts.refill:
        flat = without_signal(episodes, credit)
        others = list(islice(spare, min(len(flat), config.rollouts.refill - replaced)))
        if not others:
            break
        replaced += len(others)
        more, fresh = roll_out(others, whole=False)
        groups += more
        dropped = set(flat[: len(others)])
        episodes = [*(e for e in episodes if e.task_id not in dropped), *fresh]
        credit = collector.credit(episodes)
    counts = scored if tried is None else scored | count_picked(chosen, tried)
    batch = collector.batch(groups, episodes, credit, collector.supervision(episodes), replaced=replaced, counts=counts)
    if not batch.rows:
        logger.warning(
            "step %d: nothing to train on: all %d responses of the trained agents reached their token limit, and algorithm.truncated is "
            "mask; raise rollouts.max_tokens, or use truncated: train", step + 1, batch.counts["calls_truncated"],
        )  # fmt: skip
    return batch
