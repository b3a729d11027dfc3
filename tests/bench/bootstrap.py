"""Intervals of means over seeds: the bootstrap with expanded percentiles.

Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69, 2015. The product's intervals are of rewards
whose range is known; figures over seeds, such as tokens, have none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from lightning_core.records.statistics.intervals import MIN_TASKS, Estimate

_RESAMPLES = 10_000
_SEED = 20_150
_Z = NormalDist().inv_cdf(0.975)


def over_seeds(figures: Sequence[float]) -> Estimate:
    """The mean of ``figures``, one per seed and of any size, with its 95 % interval; NaN for fewer than `MIN_TASKS` seeds."""
    values, count = np.asarray(figures, dtype=np.float64), len(figures)
    if count < MIN_TASKS:
        return Estimate(float(values.mean()), math.nan, math.nan)
    drawn = np.random.default_rng(_SEED).integers(count, size=(_RESAMPLES, count))
    low, high = np.quantile(values[drawn].mean(axis=1), expanded_tails(count))
    return Estimate(float(values.mean()), float(low), float(high))


def expanded_tails(count: int) -> tuple[float, float]:
    """The quantiles that bound a 95% bootstrap interval of ``count`` values (see the module).

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
