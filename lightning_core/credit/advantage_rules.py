"""Advantage rules: compare the values of calls within groups or over the batch.

**Each rollout counts once** in means and deviations, however many calls or rows it has: each of its n calls in a group weighs
1/n. Averaging over rows is biased (arXiv 2608.17528): a rollout with reward 1 and three rows and a rollout with reward 0 and
one row have the mean 1/2, not 3/4. `assign_credit` gives flat groups (`is_flat`) the advantage 0 without calling the rule,
unless the rule decides about them (`AdvantageRule.flat_groups`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lightning_core.credit.episode import Value
from lightning_core.credit.precision import are_close
from lightning_core.credit.registry import advantage_rule
from lightning_core.errors import CreditError

EPSILON = 1e-6
"""Added to standard deviations, as in GRPO (arXiv 2402.03300) implementations."""


@advantage_rule("grpo")
def grpo(groups: list[list[Value]]) -> dict[str, float]:
    """`(v − μ) / (σ + ε)` of the group (GRPO, 2402.03300)."""
    advantages: dict[str, float] = {}
    for group in groups:
        mean, deviation = moments(group)
        for v in group:
            advantages[v.call] = (v.value - mean) / (deviation + EPSILON)
    return advantages


@advantage_rule("dr-grpo")
def dr_grpo(groups: list[list[Value]]) -> dict[str, float]:
    """`v − μ` of the group (Dr. GRPO, 2503.20783).
    Easy, medium and hard tasks have the same weight.
    """
    advantages: dict[str, float] = {}
    for group in groups:
        mean, _ = moments(group)
        for v in group:
            advantages[v.call] = v.value - mean
    return advantages


@advantage_rule("rloo")
def rloo(groups: list[list[Value]]) -> dict[str, float]:
    """`v −` mean of the other rollouts of the group (RLOO, 2402.14740)."""
    advantages: dict[str, float] = {}
    for group in groups:
        n = rollouts(group)
        own: dict[str, float] = {}
        for v in group:
            own[v.rollout] = own.get(v.rollout, 0.0) + v.weight * v.value
        total = math.fsum(own.values())
        for v in group:
            advantages[v.call] = v.value - (total - own[v.rollout]) / (n - 1)
    return advantages


@advantage_rule("maxrl")
def maxrl(groups: list[list[Value]]) -> dict[str, float]:
    """`(v − μ) / μ` of the group, for values of 0 or more (MaxRL, 2602.02710).
    For tasks that are rarely solved: the fewer rollouts succeed, the more each success weighs.

    Raises `CreditError` for a negative value.
    """
    advantages: dict[str, float] = {}
    for group in groups:
        negative = next((v for v in group if v.value < 0), None)
        if negative is not None:
            raise CreditError(
                f"the advantage rule 'maxrl' divides by the mean of values, which must be 0 or more, but call {negative.call!r} has "
                f"{negative.value:g}; use rewards of 0 or more, or another rule, such as 'grpo'"
            )
        mean, _ = moments(group)
        for v in group:
            advantages[v.call] = (v.value - mean) / mean
    return advantages


@advantage_rule("reinforce++", compares="batch")
def reinforce_plus_plus(groups: list[list[Value]]) -> dict[str, float]:
    """`(v − μ) / (σ + ε)` of the batch, without `group_by` (REINFORCE++, 2501.03262)."""
    batch = as_one_group(groups)
    mean, deviation = moments(batch)
    return {v.call: (v.value - mean) / (deviation + EPSILON) for v in batch}


@advantage_rule("reinforce++-baseline", whole_batch=True)
def reinforce_plus_plus_baseline(groups: list[list[Value]]) -> dict[str, float]:
    """`v − μ` of the group, then whitened over the batch.
    REINFORCE++-baseline (2501.03262).
    """
    by_group: list[list[Value]] = []
    for group in groups:
        (mean, _), flat = moments(group), is_flat(group)
        by_group.append([replace(v, value=0.0 if flat else v.value - mean) for v in group])
    centred = as_one_group(by_group)
    if all(map(is_flat, groups)):
        return {v.call: 0.0 for v in centred}
    mean, deviation = moments(centred)
    return {v.call: (v.value - mean) / (deviation + EPSILON) for v in centred}


@advantage_rule("none", compares=None)
def unchanged(groups: list[list[Value]]) -> dict[str, float]:
    """`v`, for REINFORCE, or for values that already are advantages."""
    return {v.call: v.value for group in groups for v in group}


def rollouts(group: Sequence[Value]) -> int:
    """Number of distinct rollouts in ``group``."""
    return len({v.rollout for v in group})


def is_flat(group: Sequence[Value]) -> bool:
    """Whether ``group`` has one rollout only, or values that are equal to the precision of the rewards."""
    return rollouts(group) < 2 or are_close((v.value for v in group), magnitude=max(v.magnitude for v in group))


def moments(group: Sequence[Value]) -> tuple[float, float]:
    """Mean and standard deviation; each rollout counts once.

    The deviation has Bessel's correction over rollouts.
    """
    n = rollouts(group)
    mean = math.fsum(v.weight * v.value for v in group) / n
    square = math.fsum(v.weight * (v.value - mean) ** 2 for v in group)
    return mean, math.sqrt(square / (n - 1)) if n > 1 else 0.0


def as_one_group(groups: Sequence[Sequence[Value]]) -> list[Value]:
    """All values as one group, with the weights adjusted to it."""
    values = [v for group in groups for v in group]
    calls = Counter(v.rollout for v in values)
    return [replace(v, weight=1 / calls[v.rollout]) for v in values]
