"""GRPO that also trains on tasks at which all attempts failed: they are compared with the other tasks of the step.

Values must be those of whole rollouts (``credit.rewards: broadcast``). With values that differ from turn to turn, as those of
``discounted``, early turns of solved tasks are below the batch's mean too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lightning_core.credit import ADVANTAGE_RULES, Value, advantage_rule
from lightning_core.credit.advantage_rules import EPSILON, is_flat, moments
from lightning_core.credit.precision import are_close


@advantage_rule("grpo-failed", whole_batch=True, equal_groups=True)
def grpo_failed(groups: list[list[Value]]) -> dict[str, float]:
    """`grpo`; in groups of equal values below the batch's mean, `(v − μ) / (σ + ε)` of the batch; in those above it, 0.

    NGRPO (2509.18851) and RL-ZVP (2509.21880) have the same aim with other formulas: `grpo` gives no gradient to a policy that is
    certain of a wrong answer, because all attempts have equal values. This rule makes it less certain.
    """
    calls = Counter(v.rollout for group in groups for v in group)
    batch = [replace(v, weight=1 / calls[v.rollout]) for group in groups for v in group]
    advantages = {v.call: 0.0 for v in batch}
    if is_flat(batch):
        return advantages
    mean, deviation = moments(batch)
    for v in (v for group in groups if is_flat(group) for v in group):
        if v.value < mean and not are_close((v.value, mean), magnitude=v.magnitude):
            advantages[v.call] = (v.value - mean) / (deviation + EPSILON)
    return advantages | ADVANTAGE_RULES["grpo"]([group for group in groups if not is_flat(group)])
