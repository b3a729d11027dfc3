"""The interface of what runs agents for the collector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lightning_core.endpoint.routing import Routing
from lightning_core.rollouts.attempt import Attempt, Job, Rollout

Record = Callable[[Sequence[Attempt]], None]


class AgentPool(Protocol):
    """Runs agents: in this process, or on the workers of a cluster."""

    async def roll_out(self, jobs: Sequence[Job], routing: Routing, record: Record) -> Sequence[Rollout]:
        """Return the last attempt at each job. Calls ``record`` with every attempt, one or several at a time.

        Raises `InfrastructureError` if the worker that ran them is lost, and what ``record`` raises.
        """
        ...

    async def call_endpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``function(endpoint, *arguments)``, called on a thread beside a policy endpoint.

        The function and its arguments can be pickled. Raises `InfrastructureError` if its worker is lost.
        """
        ...
