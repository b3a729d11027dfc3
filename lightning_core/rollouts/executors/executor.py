"""The protocol of an executor: runs the agent of one rollout, then its reward function, apart from the runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_core.errors import ConfigError, InfrastructureError, TimeLimitError
from lightning_core.rollouts.executors.time_limit import TimeLimit

Agent = Callable[[Any], Any]
ScoreFunction = Callable[[Any, Any], Any]
"""A reward function: called with the task and what the agent returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One agent run."""

    task: Any
    scored_task: Any
    """A copy of the task for the reward function; None if there is none."""
    seed: int
    limit: TimeLimit
    """Time limits of the agent, and of the reward function."""
    started: Callable[[Running], None]
    """The executor calls it when the agent starts, on the runner's loop."""
    repeated: bool = False
    """The rollout ran before and is run again. An executor that keeps state between rollouts uses none of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The result of an agent that returned."""

    result: Any
    """The agent's return value: a number, None, or a `Shown`. None if there is a reward function."""
    answer: str | None = None
    """The return value as JSON, if there is a reward function, and if JSON can express it."""
    score: Any = None
    """The result of the reward function, if there is one and it did not fail."""
    score_error: Exception | None = None
    """The error of the reward function; `InfrastructureError` if it was stopped."""
    score_seconds: float = 0.0
    """Seconds that the reward function ran."""


class Running(Protocol):
    """An agent that runs."""

    def slow_down(self) -> None:
        """Let others have most of the processor, where that is possible."""
        ...

    async def stacks(self) -> str:
        """What its threads, tasks and connections are doing, for the log."""
        ...


class Executor(Protocol):
    """Runs agents. The runner calls `call` and `close` on its event loop."""

    def open(self) -> None:
        """Start what runs agents, unless it is started; returns at once."""
        ...

    def discard(self) -> None:
        """End what `open` started, if no agent was run."""
        ...

    async def call(self, work: Assignment) -> Returned:
        """Run the agent in the current scope.

        Raises what the agent raised (as a `CarriedError`), `TimeLimitError` or `WholeTimeLimitError` at a time limit,
        `InfrastructureError` if its process ended, and `DisplacedError` if the rollout must be repeated for a reason that lies
        in another rollout.
        """
        ...

    async def close(self) -> None:
        """Abandon or end what still runs. Does not wait for agents."""
        ...


class ExecutorError(ConfigError):
    """Worker processes cannot import the agent, or cannot be sent a task. Stops the run."""


class TaskError(ExecutorError):
    """A worker process cannot be sent this task."""


class DisplacedError(InfrastructureError):
    """The rollout was ended for a reason that lies in another rollout. It is repeated, and not counted as a retry."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Stands for an object of an agent; its repr is that object's, shortened."""

    text: str
    type_name: str
    """That object's type."""

    def __repr__(self) -> str:
        return self.text


def no_score(error: InfrastructureError) -> InfrastructureError:
    """The error of a reward function that ended with ``error``: at a time limit, or because its process ended."""
    if not isinstance(error, TimeLimitError):
        return error
    return InfrastructureError(
        f"the reward function did not return within rollouts.timeout_seconds = {error.seconds:g} s"
    )
