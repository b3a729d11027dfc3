"""Rollouts to run, their attempts, and groups of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_core.capture.tool_results import ToolResults
from lightning_core.endpoint.replay import Recording
from lightning_core.records.store import Status
from lightning_core.trace import SpanRecord, Trace

Task = Mapping[str, Any]
"""One task: JSON values, with an ``id``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """The part of another rollout to repeat: its recorded calls, and the seed of its agent's process."""

    recording: Recording
    agent_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rollout to run."""

    task: Task
    task_id: str
    seed: int
    repeat: Repeat | None = None
    """The part of another rollout to repeat before anything is sampled."""
    tools: ToolResults | None = None
    """The tools whose results are kept, and the recorded ones to return; None: all tools run."""


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
        return self.status == "ok" or (self.status == "failed" and self.trace.reward is not None)

    @property
    def reward(self) -> float:
        """The episode's reward; 0 for an agent that failed before it got one."""
        return self.trace.reward or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a job; ``final``: it is not repeated."""

    rollout: Rollout
    final: bool


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
