"""Advantage rules: the values of calls, compared within their groups or over the batch. Pure functions that fit a screen.

Whatever the number of calls or rows of a rollout, **each rollout counts once** in means and deviations: its n calls in a group weigh
1/n each (arXiv 2608.17528: averaging over rows instead is biased: rewards 1 with three rows and 0 with one have the mean 1/2,
not 3/4). Groups of one rollout and groups of equal values get 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_core.credit.episode import Value

AdvantageRule = Callable[[list[list[Value]]], dict[str, float]]
"""``rule(groups)``: the advantage of each call."""

EPSILON = 1e-6
"""Added to standard deviations, as in GRPO (arXiv 2402.03300) implementations."""


def grpo(groups: list[list[Value]]) -> dict[str, float]:
    """A = (v − μ) / (σ + ε) within each group (arXiv 2402.03300), σ with Bessel's correction over rollouts."""
    advantages: dict[str, float] = {}
    for group in groups:
        (mean, deviation), flat = moments(group), is_flat(group)
        for v in group:
            advantages[v.call] = 0.0 if flat else (v.value - mean) / (deviation + EPSILON)
    return advantages


def dr_grpo(groups: list[list[Value]]) -> dict[str, float]:
    """A = v − μ within each group (Dr. GRPO, arXiv 2503.20783): hard and easy tasks weigh as much as those between."""
    advantages: dict[str, float] = {}
    for group in groups:
        (mean, _), flat = moments(group), is_flat(group)
        for v in group:
            advantages[v.call] = 0.0 if flat else v.value - mean
    return advantages


def rloo(groups: list[list[Value]]) -> dict[str, float]:
    """A = v − mean of the *other* rollouts of the group (arXiv 2402.14740)."""
    advantages: dict[str, float] = {}
    for group in groups:
        n, flat = rollouts(group), is_flat(group)
        own: dict[str, float] = {}
        for v in group:
            own[v.rollout] = own.get(v.rollout, 0.0) + v.weight * v.value
        total = math.fsum(own.values())
        for v in group:
            advantages[v.call] = 0.0 if flat else v.value - (total - own[v.rollout]) / (n - 1)
    return advantages


def reinforce_plus_plus(groups: list[list[Value]]) -> dict[str, float]:
    """A = (v − μ) / (σ + ε) over the whole batch (REINFORCE++, arXiv 2501.03262): no group is needed, only a batch."""
    everybody = _as_one_group([v for group in groups for v in group])
    if is_flat(everybody):
        return {v.call: 0.0 for v in everybody}
    mean, deviation = moments(everybody)
    return {v.call: (v.value - mean) / (deviation + EPSILON) for v in everybody}


def reinforce_plus_plus_baseline(groups: list[list[Value]]) -> dict[str, float]:
    """v − μ of the group, then whitened over the whole batch (REINFORCE++-baseline, arXiv 2501.03262)."""
    centred: list[Value] = []
    for group in groups:
        (mean, _), flat = moments(group), is_flat(group)
        centred += [replace(v, value=0.0 if flat else v.value - mean) for v in group]
    centred = _as_one_group(centred)
    if is_flat(centred):
        return {v.call: 0.0 for v in centred}
    mean, deviation = moments(centred)
    unsaid = {v.call for group in groups if is_flat(group) for v in group}
    return {v.call: 0.0 if v.call in unsaid else (v.value - mean) / (deviation + EPSILON) for v in centred}


def unchanged(groups: list[list[Value]]) -> dict[str, float]:
    """A = v: plain REINFORCE, or values that are advantages already."""
    return {v.call: v.value for group in groups for v in group}


ADVANTAGE_RULES: dict[str, AdvantageRule] = {
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "none": unchanged,
}


def rollouts(group: Sequence[Value]) -> int:
    """How many different rollouts are in it."""
    return len({v.rollout for v in group})


def is_flat(group: Sequence[Value]) -> bool:
    """Nothing to compare: one rollout, or the same value everywhere."""
    return rollouts(group) < 2 or min(v.value for v in group) == max(v.value for v in group)


def moments(group: Sequence[Value]) -> tuple[float, float]:
    """Mean and standard deviation (Bessel-corrected over rollouts) with each rollout counting once."""
    n = rollouts(group)
    mean = math.fsum(v.weight * v.value for v in group) / n
    square = math.fsum(v.weight * (v.value - mean) ** 2 for v in group)
    return mean, math.sqrt(square / (n - 1)) if n > 1 else 0.0


def _as_one_group(values: Sequence[Value]) -> list[Value]:
    """The same values with the weights that they have in one group of all."""
    shares: dict[str, float] = {}
    for v in values:
        shares[v.rollout] = shares.get(v.rollout, 0.0) + v.weight
    return [replace(v, weight=v.weight / shares[v.rollout]) for v in values]
