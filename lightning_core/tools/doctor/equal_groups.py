"""The share of groups that will have equal rewards, estimated from a few attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_DRAWS = 4000
_SEED = 17


class Expected(NamedTuple):
    """The expected share of groups whose rewards are all equal, with its 95% credible interval."""

    mean: float
    low: float
    high: float


def expected_equal(groups: Sequence[Sequence[float]], size: int) -> Expected:
    """The share of groups of ``size`` attempts that will be equal. ``groups``: the observed rewards of each task.

    Each task has its own distribution over the rewards seen in any task (at least two), with a Dirichlet prior of total
    weight 1. The posterior is drawn from, and the tasks are resampled (Bayesian bootstrap), as they are a sample too.
    """
    values = sorted({reward for rewards in groups for reward in rewards})
    kinds = max(2, len(values))
    generator = np.random.default_rng(_SEED)
    equal = np.empty((len(groups), _DRAWS))
    for index, rewards in enumerate(groups):
        counts = np.full(kinds, 1 / kinds)
        for reward in rewards:
            counts[values.index(reward)] += 1
        equal[index] = (generator.dirichlet(counts, _DRAWS) ** size).sum(axis=1)
    weights = generator.dirichlet(np.ones(len(groups)), _DRAWS)
    shares = (equal.T * weights).sum(axis=1)
    low, high = np.quantile(shares, [0.025, 0.975])
    return Expected(float(shares.mean()), float(low), float(high))
