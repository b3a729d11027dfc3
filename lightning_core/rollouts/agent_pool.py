"""The interface of what runs agents for the collector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_core.credit import Episode
from lightning_core.endpoint.routing import Routing
from lightning_core.rollouts.attempt import Attempt, Job, Rollout
from lightning_core.rollouts.judge import Judged

Record = Callable[[Sequence[Attempt]], None]


class AgentPool(Protocol):
    """Runs agents and the judge: in this process, or on the workers of a cluster."""

    async def roll_out(self, jobs: Sequence[Job], routing: Routing, record: Record) -> Sequence[Rollout]:
        """Return the last attempt at each job. Calls ``record`` with every attempt, one or several at a time.

        Raises `InfrastructureError` if the worker that ran them is lost, and what ``record`` raises.
        """
        ...

    async def judge(self, episodes: Sequence[Episode], step: int) -> Judged:
        """Return the judge's scores for one group. Raises `InfrastructureError` if its worker is lost."""
        ...
