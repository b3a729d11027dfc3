"""Rollouts to run, and their attempts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_core.capture.tool_results import ToolResults
from lightning_core.records.store import LEFT_OUT, Status
from lightning_core.rollouts.forks import Fork, difference
from lightning_core.rollouts.tasks import Task
from lightning_core.trace import SpanRecord, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rollout to run."""

    task: Task
    task_id: str
    seed: int
    fork: Fork | None = None
    """What to repeat of another rollout, and from where on to sample anew."""
    tools: ToolResults | None = None
    """The tools whose results are kept, and the recorded ones to return; None: all tools run."""


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def dropped(self) -> str | None:
        """Why a fork is not used; None if it is, and for other rollouts."""
        if self.job.fork is None:
            return None
        if self.status in LEFT_OUT:
            return self.error or self.status
        recorded = () if self.job.tools is None else self.job.tools.recorded
        return difference(self.job.fork.recording, self.trace, recorded)

    @property
    def reward(self) -> float:
        """The episode's reward; 0 for an agent that failed before it got one."""
        return self.trace.reward or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a job; ``final``: it is not repeated."""

    rollout: Rollout
    final: bool
