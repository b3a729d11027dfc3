"""The share of groups that will have equal rewards, estimated from a few attempts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import lgamma
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_DRAWS = 4000
_SEED = 17
_PRIOR = list(product((0.001, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), (0.3, 1.0, 3.0, 10.0)))
"""Equally probable before the attempts: the share of constant tasks, and the total weight of the Dirichlet prior of the other tasks.
With a larger weight their rewards vary more."""


class Expected(NamedTuple):
    """The expected share of groups whose rewards are all equal, with its 95% credible interval."""

    mean: float
    low: float
    high: float


def expected_equal(groups: Sequence[Sequence[float]], size: int) -> Expected:
    """The share of groups of ``size`` attempts that will be equal. ``groups``: the observed rewards of each task.

    A task either earns a constant reward, or has its own distribution over the K rewards seen in any task (at least two), with a symmetric
    Dirichlet prior. How many tasks are constant and how much the others vary are inferred from all tasks. The posterior is drawn from, and
    the tasks are resampled (Bayesian bootstrap), as they are a sample too.
    """
    counts_TK = _counts(groups)
    generator = np.random.default_rng(_SEED)
    probability_H, constant_HT = _posterior(counts_TK)
    drawn_D = generator.choice(len(_PRIOR), _DRAWS, p=probability_H)
    weight_D1 = np.array([weight for _, weight in _PRIOR])[drawn_D, None]
    equal_TD: list[NDArray[np.float64]] = []
    for counts_K, constant_H in zip(counts_TK, constant_HT.T, strict=True):
        gamma_DK = generator.standard_gamma(counts_K + weight_D1 / len(counts_K)) + np.finfo(float).tiny
        varied_D = ((gamma_DK / gamma_DK.sum(axis=1, keepdims=True)) ** size).sum(axis=1)
        equal_TD.append(np.where(generator.random(_DRAWS) < constant_H[drawn_D], 1.0, varied_D))
    bootstrap_DT = generator.dirichlet(np.ones(len(groups)), _DRAWS)
    share_D = (np.stack(equal_TD, axis=1) * bootstrap_DT).sum(axis=1).clip(0, 1)
    low, high = np.quantile(share_D, [0.025, 0.975])
    return Expected(float(share_D.mean()), float(low), float(high))


def _counts(groups: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """How often each of the K rewards was seen in each of the T tasks."""
    values = sorted({reward for rewards in groups for reward in rewards})
    counts_TK = np.zeros((len(groups), max(2, len(values))))
    for task, rewards in enumerate(groups):
        for reward in rewards:
            counts_TK[task, values.index(reward)] += 1
    return counts_TK


def _posterior(counts_TK: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The probabilities [H] of the H pairs of `_PRIOR`, and with each of them that of each task to be constant [H, T]."""
    total_T, kinds = counts_TK.sum(axis=1), counts_TK.shape[1]
    is_equal_T = counts_TK.max(axis=1) == total_T
    log_gamma = np.vectorize(lgamma)
    likelihood: list[float] = []
    constant: list[NDArray[np.float64]] = []
    for share, weight in _PRIOR:
        own = weight / kinds
        seen_T = (log_gamma(own + counts_TK) - log_gamma(own)).sum(axis=1)
        varied_T = np.log(1 - share) + log_gamma(weight) - log_gamma(weight + total_T) + seen_T
        constant_T = np.where(is_equal_T, np.log(share / kinds), -np.inf)
        either_T = np.logaddexp(constant_T, varied_T)
        likelihood.append(float(either_T.sum()))
        constant.append(np.exp(constant_T - either_T))
    probability_H = np.exp(np.array(likelihood) - max(likelihood))
    return probability_H / probability_H.sum(), np.stack(constant)
