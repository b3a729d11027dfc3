"""95% confidence intervals of mean rewards, and the comparison of two evaluations.

The sample is the tasks: attempts at a task are not independent, so they are averaged first.

- If all rewards are 0 or 1: the Wilson score interval, which is accurate near 0, near 1 and for
  few tasks.
- Other rewards, and all improvements: the bootstrap over tasks with expanded percentiles
  (Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69,
  2015), 10,000 resamples, fixed seed. Improvements are paired: the same tasks before and after.
- Fewer than 6 tasks give no bootstrap interval: with 5 pairs even a unanimous result has a
  two-sided sign-test p of 0.0625.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_TASKS = 6
"""Minimum number of tasks for a bootstrap interval."""
_RESAMPLES = 10_000
_SEED = 20_150
_CHUNK = 1_000_000
"""Maximum number of values drawn at a time."""
_Z = NormalDist().inv_cdf(0.975)


class Estimate(NamedTuple):
    """A mean with its 95% interval; the ends are NaN if there are too few tasks."""

    mean: float
    low: float
    high: float

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if math.isnan(self.low) else (self.low, self.high)


def confidence_interval(values: Sequence[float]) -> Estimate:
    """The mean of ``values``, one per task, with its interval. Raises ValueError if empty."""
    array = _checked(values)
    if set(array.tolist()) <= {0.0, 1.0}:
        return _wilson(array)
    return _bootstrap(array)


def paired_improvement(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """The mean of ``after - before``, both in the same order of tasks, with its interval."""
    if len(before) != len(after):
        raise ValueError(f"expected the same tasks twice, found {len(before)} before and {len(after)} after")
    return _bootstrap(_checked(after) - _checked(before))


def _checked(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ValueError(f"expected one finite reward for each task and at least one, found {values!r}")
    return array


def _wilson(values: NDArray[np.float64]) -> Estimate:
    count, share = len(values), float(values.mean())
    scale = 1 + _Z**2 / count
    centre = (share + _Z**2 / (2 * count)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    # At 0 of n and n of n one end is exactly the share; rounding must not move it beyond.
    return Estimate(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def _bootstrap(values: NDArray[np.float64]) -> Estimate:
    count, mean = len(values), float(values.mean())
    if count < MIN_TASKS:
        return Estimate(mean, math.nan, math.nan)
    generator = np.random.default_rng(_SEED)
    at_once = max(1, _CHUNK // count)
    sizes = [min(at_once, _RESAMPLES - start) for start in range(0, _RESAMPLES, at_once)]
    means = np.concatenate([values[generator.integers(count, size=(size, count))].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, expanded_tails(count))
    return Estimate(mean, float(low), float(high))


def expanded_tails(count: int) -> tuple[float, float]:
    """The quantiles that bound a 95% bootstrap interval of ``count`` values (Hesterberg, see the module).

    Plain percentiles are too narrow for few values, like a z interval without n - 1.
    """
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * _t975(count - 1))
    return tail, 1 - tail


def _t975(freedom: int) -> float:
    """The 97.5% quantile of Student's t; error below 0.1% from 5 degrees of freedom.

    Source: Abramowitz and Stegun 26.7.5.
    """
    z, v = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Mean reward on the same tasks before and after training, in the unit of the reward."""

    tasks: int
    """Number of tasks with a reward both before and after."""
    eval_reward_before: float
    eval_reward_after: float
    eval_ci95_before: tuple[float, float] | None
    eval_ci95_after: tuple[float, float] | None
    improvement: float
    improvement_ci95: tuple[float, float] | None

    @property
    def improved(self) -> bool:
        """Whether the improvement's interval lies above 0."""
        return self.improvement_ci95 is not None and self.improvement_ci95[0] > 0


def compare(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Comparison:
    """Compare two evaluations, each a mapping from task id to the rewards of its attempts.

    A task without rewards on one side (every attempt was an infrastructure failure) is left out
    of both. Raises ValueError if no task remains.
    """
    common = [task for task in before if before[task] and after.get(task)]
    if not common:
        raise ValueError(f"no task has a reward both before ({len(before)} tasks) and after ({len(after)} tasks)")
    first = [math.fsum(before[task]) / len(before[task]) for task in common]
    last = [math.fsum(after[task]) / len(after[task]) for task in common]
    start, end, gain = confidence_interval(first), confidence_interval(last), paired_improvement(first, last)
    return Comparison(
        tasks=len(common),
        eval_reward_before=start.mean,
        eval_reward_after=end.mean,
        eval_ci95_before=start.interval,
        eval_ci95_after=end.interval,
        improvement=gain.mean,
        improvement_ci95=gain.interval,
    )


def compare_splits(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], splits: Mapping[str, str]
) -> dict[str, Comparison]:
    """`compare` for each split; ``splits`` maps task ids to splits.

    Splits without common tasks are left out.
    """
    comparisons: dict[str, Comparison] = {}
    for name in dict.fromkeys(splits.values()):
        first = {task: rewards for task, rewards in before.items() if splits.get(task) == name}
        if any(first[task] and after.get(task) for task in first):
            comparisons[name] = compare(first, after)
    return comparisons
