"""Figures over seeds and tasks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_core.records.statistics.intervals import MIN_TASKS, Estimate
from tests.bench.bootstrap import expanded_tails
from tests.bench.learning.records import Record

WINDOW = 2
"""Number of steps whose mean reward is a point of a smoothed curve; the steps of all arms cost about as many tokens."""
_RESAMPLES = 10_000


def smoothed(record: Record) -> list[float]:
    """The mean training reward of the rollouts of the last `WINDOW` steps, after each step; NaN before."""
    found = [float("nan")] * min(WINDOW - 1, len(record.rewards))
    for end in range(WINDOW, len(record.rewards) + 1):
        steps = slice(end - WINDOW, end)
        found.append(float(np.average(record.rewards[steps], weights=record.attempts[steps])))
    return found


def final_reward(record: Record) -> float:
    """The smoothed training reward at the end."""
    return smoothed(record)[-1]


def tokens_to_reach(record: Record, reward: float) -> int | None:
    """Tokens sampled until the smoothed training reward is ``reward``; None if it never is."""
    spent = np.cumsum(record.tokens)
    return next((int(at) for at, value in zip(spent, smoothed(record), strict=True) if value >= reward), None)


def mean_over_tokens(record: Record) -> float:
    """The area under the curve: the mean training reward, each step weighted by its tokens."""
    return float(np.average(record.rewards, weights=record.tokens))


def over_seeds_and_tasks(rewards: NDArray[np.float64]) -> Estimate:
    """The mean of ``rewards`` [seeds, tasks] with its 95 % interval, from resampled seeds and resampled tasks.

    All seeds have the same tasks, so a task is drawn for all of them (a bootstrap of crossed factors; Owen and Eckles, 2012,
    "Bootstrapping data arrays of arbitrary order"), whose percentiles are as wide for few seeds as those of
    `tests.bench.bootstrap`. NaN for fewer than `MIN_TASKS` seeds.
    """
    seeds, tasks = rewards.shape
    mean = float(rewards.mean())
    if seeds < MIN_TASKS:
        return Estimate(mean, float("nan"), float("nan"))
    rng = np.random.default_rng(0)
    by_seed = rng.multinomial(seeds, [1 / seeds] * seeds, size=_RESAMPLES) / seeds
    by_task = rng.multinomial(tasks, [1 / tasks] * tasks, size=_RESAMPLES) / tasks
    means = ((by_seed @ rewards) * by_task).sum(axis=1)
    low, high = np.quantile(means, expanded_tails(seeds))
    return Estimate(mean, float(low), float(high))


def held_out_matrix(records: Sequence[Record]) -> NDArray[np.float64]:
    """The held-out rewards [seeds, tasks] of tasks that all of ``records`` have."""
    ids = sorted(set.intersection(*(set(r.held_out) for r in records)))
    return np.array([[r.held_out[task] for task in ids] for r in records], dtype=np.float64)


def mean_curve(curves: Sequence[tuple[Sequence[float], Sequence[float]]], points: int = 60) -> NDArray[np.float64]:
    """The rows x, mean, least and most [4, points], of ``curves`` (x, y), interpolated where all of them are defined."""
    known = [(np.asarray(x)[~np.isnan(y)], np.asarray(y)[~np.isnan(y)]) for x, y in curves]
    low, high = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    grid = np.linspace(low, max(low, high), points)
    values = np.array([np.interp(grid, x, y) for x, y in known])
    return np.array([grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)])
