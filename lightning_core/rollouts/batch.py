"""What a step collects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_core.credit import Credit, Episode
from lightning_core.rollouts.attempt import Rollout
from lightning_core.rollouts.tasks import Task
from lightning_core.transitions import Row


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
    forks: Sequence[Rollout] = ()
    """Forks of the attempts (``rollouts.forks``), without the dropped ones."""
    forks_dropped: int = 0
    """Number of forks that did not reach their call with the recorded history, or were left out."""
    tokens_dropped: int = 0
    """Tokens that these forks sampled."""

    @property
    def trained(self) -> Sequence[Rollout]:
        """The attempts and their forks."""
        return [*self.rollouts, *self.forks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Episodes with credit, and the rows to train on."""

    episodes: Sequence[Episode]
    credit: Credit
    rows: Sequence[Row]
    counts: Mapping[str, float]
    """Sums (`counts`). Add the counts of a step's batches to get those of the step."""
