"""95% confidence intervals of mean rewards, and the comparison of two evaluations.

The sample is the tasks: attempts at a task are not independent, so they are averaged first. Improvements are paired: the same tasks
before and after.

The interval is that of Learned-Miller and Thomas ("A New Confidence Interval for the Mean of a Bounded Random Variable", arXiv
1905.06208): the weights of the sorted values and of the end of their range are the gaps between uniform order statistics, and an end
of the interval is a quantile of the weighted mean; 10,000 draws, fixed seed. For rewards of 0 and 1 it is the exact interval of Clopper
and Pearson. In simulations of 6 to 12 tasks it covers the mean in 95% or more, also if rewards are rare or tied, where the bootstrap
and Student's t cover 40 to 90% (``tests/records/test_intervals.py``). In return it is wider for few tasks.

It needs the range of the rewards: 0 to 1, or wider if the rewards are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_TASKS = 6
"""Minimum number of tasks for a significant improvement: with 5, the interval of a unanimous one includes 0."""
_DRAWS = 10_000
_SEED = 20_150
_CHUNK = 1_000_000
"""Maximum number of weights drawn at a time."""
_TAIL = 0.025


class Estimate(NamedTuple):
    """A mean with its 95% interval; the ends are NaN if there are too few tasks."""

    mean: float
    low: float
    high: float

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if math.isnan(self.low) else (self.low, self.high)

    def text(self, *, sign: str = "", missing: str = " [too few tasks]") -> str:
        """See `format_mean`."""
        return format_mean(self.mean, self.interval, sign=sign, missing=missing)


def format_mean(
    mean: float,
    interval: tuple[float, float] | None,
    *,
    sign: str = "",
    digits: int = 3,
    missing: str = " [too few tasks]",
) -> str:
    """``0.500 [0.300, 0.700]``. ``sign``: ``+`` for a sign before positive numbers too. ``missing``: in place of an interval of None."""
    ends = missing if interval is None else f" [{', '.join(f'{end:{sign}.{digits}f}' for end in interval)}]"
    return f"{mean:{sign}.{digits}f}{ends}"


def confidence_interval(values: Sequence[float]) -> Estimate:
    """The mean of ``values``, one per task in any order, with its interval. Raises ValueError if empty."""
    array = _checked(values)
    return _interval(array, *_reward_range(array))


def paired_improvement(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """The mean of ``after - before``, both in the same order of tasks, with its interval."""
    if len(before) != len(after):
        raise ValueError(f"expected the same tasks twice, found {len(before)} before and {len(after)} after")
    first, last = _checked(before), _checked(after)
    least, most = _reward_range(np.concatenate([first, last]))
    if len(first) < MIN_TASKS:
        return Estimate(_mean(last - first), math.nan, math.nan)
    return _interval(last - first, least - most, most - least)


def _checked(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise ValueError(f"expected one finite reward for each task and at least one, found {values!r}")
    return array


def _reward_range(rewards: NDArray[np.float64]) -> tuple[float, float]:
    return min(0.0, float(rewards.min())), max(1.0, float(rewards.max()))


def _mean(values: NDArray[np.float64]) -> float:
    return math.fsum(values) / len(values)


def _interval(values: NDArray[np.float64], least: float, most: float) -> Estimate:
    """The mean of ``values``, which lie between ``least`` and ``most``, with its interval. It does not depend on their order."""
    values, mean, count = np.sort(values), _mean(values), len(values)
    generator = np.random.default_rng(_SEED)
    at_once = _CHUNK // count + 1
    sizes = [min(at_once, _DRAWS - start) for start in range(0, _DRAWS, at_once)]
    # Gaps between uniform order statistics are exponential values divided by their sum. The last one is beta distributed and
    # independent of the ratios of the others, so its quantiles replace draws.
    gaps = (generator.standard_exponential((size, count)) for size in sizes)
    inside = np.concatenate([(gaps_RN @ values) / gaps_RN.sum(axis=1) for gaps_RN in gaps])
    end = 1 - (1 - (np.arange(_DRAWS) + 0.5) / _DRAWS) ** (1 / count)
    low = float(np.quantile(inside + end * (least - inside), _TAIL))
    high = float(np.quantile(inside + end * (most - inside), 1 - _TAIL))
    # If all values are at an end of the range, rounding must not move the interval's end beyond it.
    return Estimate(mean, min(max(least, low), mean), max(min(most, high), mean))


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
