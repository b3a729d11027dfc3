"""An advantage rule to be measured: groups in which all attempts failed are compared with the batch.

--variant "failed groups: credit.advantage=tests.bench.defaults.failed_groups:grpo_failed"

It is not declared, so its advantages of groups with equal values count. It is for rewards of whole rollouts (`broadcast`): with values
that differ from turn to turn, as those of `discounted`, early turns of solved tasks are below the batch's mean too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lightning_core.credit import ADVANTAGE_RULES, Value
from lightning_core.credit.advantage_rules import EPSILON, is_flat, moments


def grpo_failed(groups: list[list[Value]]) -> dict[str, float]:
    """`grpo`; in groups of equal values below the batch's mean, `(v − μ) / (σ + ε)` of the batch; in those above it, 0.

    NGRPO (2509.18851) and RL-ZVP (2509.21880) have the same aim with other formulas: `grpo` gives no gradient to a policy that is
    certain of a wrong answer, because all attempts have equal values. This rule makes it less certain.
    """
    calls = Counter(v.rollout for group in groups for v in group)
    batch = [replace(v, weight=1 / calls[v.rollout]) for group in groups for v in group]
    if is_flat(batch):
        return {v.call: 0.0 for v in batch}
    mean, deviation = moments(batch)
    below = {v.call: min(0.0, (v.value - mean) / (deviation + EPSILON)) for v in batch}
    return below | ADVANTAGE_RULES["grpo"]([group for group in groups if not is_flat(group)])
