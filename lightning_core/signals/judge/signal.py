"""Adds a judge's scores to the rewards of episodes, and records them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_core.credit import Episode
from lightning_core.endpoint.interface import Endpoint
from lightning_core.errors import InfrastructureError
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import AgentPool, Task
from lightning_core.rollouts.signal import Resources, Signal
from lightning_core.signals.judge.scores import JudgeResult, judge_group, reward_spans, with_scores
from lightning_core.signals.judge.section import Judge, judge_of
from lightning_core.trace import Reward

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class JudgeSignal(Signal):
    """The judge of a run."""

    phase: ClassVar[str | None] = "judge"

    settings: Judge
    agents: AgentPool
    store: Store

    async def annotate(
        self, episodes: Sequence[Episode], tasks: Mapping[str, Task], step: int, *, required: bool
    ) -> Sequence[Episode]:
        """``episodes`` with the judge's scores among their rewards.

        The attempts at one task are scored together. A single attempt is not scored. A task whose scoring fails is logged and stays
        unscored; if scoring fails for every task and ``required`` is set, raises `InfrastructureError`.
        """
        by_task: dict[str, list[Episode]] = {}
        for episode in episodes:
            by_task.setdefault(episode.task_id, []).append(episode)
        comparable = [group for group in by_task.values() if len(group) > 1]
        outcomes = await asyncio.gather(*(self._judge(group, step) for group in comparable))
        failures = [outcome for outcome in outcomes if isinstance(outcome, InfrastructureError)]
        model = self.settings.model
        if required and failures and len(failures) == len(outcomes):
            raise InfrastructureError(
                f"the judge {model!r} scored none of {len(outcomes)} groups; the first error: {failures[0]}"
            )
        for failure in failures:
            logger.warning("the judge %r did not score a group: %s", model, failure)
        scores = {k: v for outcome in outcomes if not isinstance(outcome, Exception) for k, v in outcome.items()}
        return with_scores(episodes, scores)

    async def _judge(
        self, episodes: Sequence[Episode], step: int
    ) -> Mapping[str, Sequence[Reward]] | InfrastructureError:
        try:
            result: JudgeResult = await self.agents.call_endpoint(judge_at, episodes, self.settings, step)
        except InfrastructureError as error:
            return error
        await asyncio.to_thread(self.store.add_rollouts, result.records)
        if result.error is not None:
            return InfrastructureError(result.error)
        await asyncio.to_thread(self.store.add_spans, reward_spans(result.scores))
        return result.scores


def judge_at(endpoint: Endpoint, episodes: Sequence[Episode], judge: Judge, step: int) -> JudgeResult:
    """The judge's scores of one group, through ``endpoint``."""
    return judge_group(episodes, judge, endpoint, step)


def open_signal(resources: Resources) -> Signal | None:
    """The judge of ``credit.judge``, if it is set."""
    judge = judge_of(resources.config.credit)
    return None if judge is None else JudgeSignal(settings=judge, agents=resources.agents, store=resources.store)
