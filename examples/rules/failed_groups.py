"""Advantages of groups in which all attempts failed.

credit: {advantage: "examples.rules.failed_groups:grpo_failed"}
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lightning_core.credit import ADVANTAGE_RULES, Value, advantage_rule
from lightning_core.credit.advantage_rules import EPSILON, is_flat, moments


@advantage_rule("grpo-failed", whole_batch=True, compares_flat=True)
def grpo_failed(groups: list[list[Value]]) -> dict[str, float]:
    """`grpo`; in groups with equal values below the batch's mean `(v − μ) / (σ + ε)` of the batch.

    A policy that is certain of a wrong answer gets no gradient from `grpo`: all attempts fail alike. Here it gets less certain.
    Groups with equal values of at least the mean get 0.
    """
    calls = Counter(v.rollout for group in groups for v in group)
    batch = [replace(v, weight=1 / calls[v.rollout]) for group in groups for v in group]
    if is_flat(batch):
        return {v.call: 0.0 for v in batch}
    mean, deviation = moments(batch)
    differing = [group for group in groups if not is_flat(group)]
    below = {v.call: min(0.0, (v.value - mean) / (deviation + EPSILON)) for v in batch}
    return below | ADVANTAGE_RULES["grpo"](differing)
