"""Rollouts to run, their attempts, groups of them, and the interface of what runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_core.capture.run import ToolRunner
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.recorded import RecordedResponses
from lightning_core.records.store import LEFT_OUT, Status
from lightning_core.trace import SpanRecord, Trace

Task = Mapping[str, Any]
"""One task: JSON values, with an ``id``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rollout to run."""

    task: Task
    task_id: str
    seed: int
    agent_seed: int | None = None
    """The seed of the agent's process; None: from ``seed`` and the attempt."""
    recorded: Callable[[], RecordedResponses] | None = None
    """Creates the responses that answer its first calls, for one attempt; None: all are sampled."""
    tools: Callable[[], ToolRunner] | None = None
    """Creates what runs its tools, for one attempt; None: they run as usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished attempt."""

    job: Job
    attempt: int
    status: Status
    trace: Trace
    spans: tuple[SpanRecord, ...]
    error: str | None
    seconds: float
    score_seconds: float = 0.0
    """The seconds of these that the reward function took."""

    @property
    def has_reward(self) -> bool:
        """Whether it returned, or gave a reward before it failed."""
        return self.status == "ok" or (self.status not in LEFT_OUT and self.trace.reward is not None)

    @property
    def reward(self) -> float:
        """The episode's reward; 0 for an agent that failed before it got one."""
        return self.trace.reward or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a job; ``final``: it is not repeated."""

    rollout: Rollout
    final: bool
    is_recorded: bool = False
    """Whether the store has it, from before the run was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The finished attempts at one task."""

    task: Task
    step: int
    """Number of updates before these rollouts."""
    rollouts: Sequence[Rollout]
    """The last attempt at each job."""
    lost: int = 0
    """Number of jobs without a rollout because their worker was lost."""
    error: str | None = None
    """The error that lost the worker."""
    more: Sequence[Rollout] = ()
    """Further rollouts of the task that are trained on, but do not start at its beginning (`Signal.extend`)."""
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Counts of those further rollouts."""

    @property
    def trained(self) -> Sequence[Rollout]:
        """All rollouts that are trained on."""
        return [*self.rollouts, *self.more]


Record = Callable[[Sequence[Attempt]], None]
"""Gets attempts as they finish."""


class AgentPool(Protocol):
    """Runs agents: in this process, or on the workers of a cluster."""

    async def roll_out(self, jobs: Sequence[Job], routing: Routing, record: Record) -> Sequence[Rollout]:
        """Return the last attempt at each job, in the order of ``jobs``. Calls ``record`` with every attempt, one or several at a time.

        Raises `InfrastructureError` if the worker that ran them is lost, and what ``record`` raises.
        """
        ...

    async def call_endpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``function(endpoint, *arguments)``, called on a thread beside a policy endpoint.

        The function and its arguments can be pickled. Raises `InfrastructureError` if its worker is lost.
        """
        ...
