"""Advantage rules: the values of calls, compared within their groups or over the batch. Pure functions that fit a screen.

**Each rollout counts once** in means and deviations, independent of its number of calls or rows: its n calls in a group weigh
1/n each (arXiv 2608.17528: averaging over rows instead is biased: rewards 1 with three rows and 0 with one have the mean 1/2,
not 3/4). Groups of one rollout and groups of equal values get 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lightning_core.credit.episode import Value
from lightning_core.credit.registry import advantage_rule

EPSILON = 1e-6
"""Added to standard deviations, as in GRPO (arXiv 2402.03300) implementations."""


@advantage_rule("grpo")
def grpo(groups: list[list[Value]]) -> dict[str, float]:
    """`(v − μ) / (σ + ε)` of the group (GRPO, 2402.03300)."""
    advantages: dict[str, float] = {}
    for group in groups:
        (mean, deviation), flat = moments(group), is_flat(group)
        for v in group:
            advantages[v.call] = 0.0 if flat else (v.value - mean) / (deviation + EPSILON)
    return advantages


@advantage_rule("dr-grpo")
def dr_grpo(groups: list[list[Value]]) -> dict[str, float]:
    """`v − μ` of the group (Dr. GRPO, 2503.20783): hard and easy tasks weigh as much as those between."""
    advantages: dict[str, float] = {}
    for group in groups:
        (mean, _), flat = moments(group), is_flat(group)
        for v in group:
            advantages[v.call] = 0.0 if flat else v.value - mean
    return advantages


@advantage_rule("rloo")
def rloo(groups: list[list[Value]]) -> dict[str, float]:
    """`v −` mean of the other rollouts of the group (RLOO, 2402.14740)."""
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


@advantage_rule("reinforce++", compares="batch")
def reinforce_plus_plus(groups: list[list[Value]]) -> dict[str, float]:
    """`(v − μ) / (σ + ε)` of the batch, without regard to `group_by` (REINFORCE++, 2501.03262)."""
    everybody = _as_one_group(groups)
    if is_flat(everybody):
        return {v.call: 0.0 for v in everybody}
    mean, deviation = moments(everybody)
    return {v.call: (v.value - mean) / (deviation + EPSILON) for v in everybody}


@advantage_rule("reinforce++-baseline", whole_batch=True)
def reinforce_plus_plus_baseline(groups: list[list[Value]]) -> dict[str, float]:
    """`v − μ` of the group, then whitened over the batch (REINFORCE++-baseline, 2501.03262)."""
    by_group: list[list[Value]] = []
    for group in groups:
        (mean, _), flat = moments(group), is_flat(group)
        by_group.append([replace(v, value=0.0 if flat else v.value - mean) for v in group])
    centred = _as_one_group(by_group)
    if is_flat(centred):
        return {v.call: 0.0 for v in centred}
    mean, deviation = moments(centred)
    unsaid = {v.call for group in groups if is_flat(group) for v in group}
    return {v.call: 0.0 if v.call in unsaid else (v.value - mean) / (deviation + EPSILON) for v in centred}


@advantage_rule("none", compares=None)
def unchanged(groups: list[list[Value]]) -> dict[str, float]:
    """`v`: REINFORCE, or values that are advantages already."""
    return {v.call: v.value for group in groups for v in group}


def rollouts(group: Sequence[Value]) -> int:
    """How many different rollouts are in it."""
    return len({v.rollout for v in group})


def is_flat(group: Sequence[Value]) -> bool:
    """Nothing to compare: one rollout, or the same value everywhere but for rounding."""
    if rollouts(group) < 2:
        return True
    low, high = min(v.value for v in group), max(v.value for v in group)
    return math.isclose(low, high, rel_tol=1e-12, abs_tol=1e-12)


def moments(group: Sequence[Value]) -> tuple[float, float]:
    """Mean and standard deviation (Bessel-corrected over rollouts) with each rollout counting once."""
    n = rollouts(group)
    mean = math.fsum(v.weight * v.value for v in group) / n
    square = math.fsum(v.weight * (v.value - mean) ** 2 for v in group)
    return mean, math.sqrt(square / (n - 1)) if n > 1 else 0.0


def _as_one_group(groups: Sequence[Sequence[Value]]) -> list[Value]:
    """All values, with the weights that they have in one group."""
    values = [v for group in groups for v in group]
    calls = Counter(v.rollout for v in values)
    return [replace(v, weight=1 / calls[v.rollout]) for v in values]
