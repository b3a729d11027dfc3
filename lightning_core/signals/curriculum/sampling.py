"""Samples the tasks of a step by how much can be learned from them (``tasks.sampling: curriculum``).

Attempts at a task that all succeed or all fail have equal rewards, so their group has no gradient. The variance p(1 − p) of success
with probability p is the task's *learnability* (SFL, arXiv 2408.15099; for language models LILO, arXiv 2502.12272).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from lightning_core.records.statistics.task_history import Tried
from lightning_core.rollouts.attempt import Task

_PRIOR = 0.5
"""The success rate of a task that was never tried. It counts as one attempt (Jeffreys' prior)."""


def success_rate(tried: Tried | None) -> float:
    """The estimated probability that an attempt succeeds: (solved + 1/2) / (attempts + 1)."""
    return _PRIOR if tried is None else (tried.solved + _PRIOR) / (tried.attempts + 1)


def sampling_probabilities(tasks: Sequence[Task], tried: Mapping[str, Tried], floor: float) -> list[float]:
    """The probability of each task to be drawn first: proportional to p(1 − p), except for the part ``floor``, which is uniform."""
    rates = [success_rate(tried.get(str(task["id"]))) for task in tasks]
    learnable = [rate * (1 - rate) for rate in rates]
    total = math.fsum(learnable)
    return [(1 - floor) * weight / total + floor / len(tasks) for weight in learnable]


def draw_tasks(tasks: Sequence[Task], probabilities: Sequence[float], size: int, *, seed: str) -> list[Task]:
    """``size`` tasks, without repetition as long as there are others.

    Weighted sampling without replacement by exponential keys (Efraimidis and Spirakis, 2006).
    """
    numbers = random.Random(seed)
    keys = [-math.log(1 - numbers.random()) / probability for probability in probabilities]
    order = sorted(range(len(tasks)), key=keys.__getitem__)
    return [tasks[order[position % len(tasks)]] for position in range(size)]


def count_picked(picked: Sequence[Task], tried: Mapping[str, Tried]) -> dict[str, float]:
    """The tasks of a step: how many there are, how many were never tried before, and the sum of their success rates."""
    found = [tried.get(str(task["id"])) for task in picked]
    return {
        "tasks_sampled": len(found),
        "tasks_sampled_new": sum(attempts is None for attempts in found),
        "tasks_sampled_success_sum": math.fsum(map(success_rate, found)),
    }
