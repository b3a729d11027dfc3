"""Episodes with the scores of the judge (``credit.judge``), recorded as rewards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from lightning_core.config.credit import Judge
from lightning_core.credit import Episode
from lightning_core.errors import InfrastructureError
from lightning_core.records.store import Store
from lightning_core.rollouts.agent_pool import AgentPool
from lightning_core.rollouts.judge import reward_spans, with_scores
from lightning_core.trace import Reward

logger = logging.getLogger(__name__)


async def judge_episodes(
    judge: Judge, agents: AgentPool, store: Store, episodes: Sequence[Episode], step: int, *, required: bool
) -> list[Episode]:
    """``episodes`` with the scores of ``judge`` among their rewards.

    The attempts at one task are scored together. A single attempt is not scored. A task whose scoring fails is logged and stays
    unscored; if scoring fails for every task and ``required`` is set, raises `InfrastructureError`.
    """
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task_id, []).append(episode)
    comparable = [found for found in by_task.values() if len(found) > 1]
    outcomes = await asyncio.gather(*(_judge(agents, store, found, step) for found in comparable))
    failures = [outcome for outcome in outcomes if isinstance(outcome, InfrastructureError)]
    if required and failures and len(failures) == len(outcomes):
        raise InfrastructureError(
            f"the judge {judge.model!r} scored none of {len(outcomes)} groups; the first error: {failures[0]}"
        )
    for failure in failures:
        logger.warning("the judge %r did not score a group: %s", judge.model, failure)
    scores = {k: v for found in outcomes if not isinstance(found, Exception) for k, v in found.items()}
    return with_scores(episodes, scores)


async def _judge(
    agents: AgentPool, store: Store, episodes: Sequence[Episode], step: int
) -> Mapping[str, Sequence[Reward]] | InfrastructureError:
    try:
        judged = await agents.judge(episodes, step)
    except InfrastructureError as error:
        return error
    await asyncio.to_thread(store.add_rollouts, judged.records)
    if judged.error is not None:
        return InfrastructureError(judged.error)
    await asyncio.to_thread(store.add_spans, reward_spans(judged.scores))
    return judged.scores
