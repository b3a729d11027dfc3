"""GRPO that also trains on tasks at which all attempts earned equally little: they are compared with the other tasks of the step.

Values must be those of whole rollouts (``credit.rewards: broadcast``). With values that differ from turn to turn, as those of
``discounted``, early turns of solved tasks are below the batch's mean too.
"""

from __future__ import annotations

from lightning_core.credit import Value, advantage_rule
from lightning_core.credit.advantage_rules import EPSILON, as_one_group, grpo, is_flat, moments, rollouts
from lightning_core.credit.precision import are_close


@advantage_rule("grpo-failed", whole_batch=True, flat_groups=True)
def grpo_failed(groups: list[list[Value]]) -> dict[str, float]:
    """`grpo`; in groups of equal values below the batch's mean, `(v − μ) / (σ + ε)` of the batch.
    Groups of equal values above it, and of one rollout, get 0.

    NGRPO (2509.18851) and RL-ZVP (2509.21880) have the same aim with other formulas: `grpo` gives no gradient to a policy that is
    certain of a wrong answer, because all attempts have equal values. This rule makes it less certain.
    """
    batch = as_one_group(groups)
    mean, deviation = moments(batch)
    advantages = {v.call: 0.0 for v in batch} | grpo([group for group in groups if not is_flat(group)])
    for group in groups:
        if is_flat(group) and rollouts(group) > 1:
            for v in group:
                if v.value < mean and not are_close((v.value, mean), magnitude=v.magnitude):
                    advantages[v.call] = (v.value - mean) / (deviation + EPSILON)
    return advantages
