"""Advantage rules to be measured: groups in which all attempts failed are compared with the batch, or with an imagined success.

--variant "failed groups: credit.advantage=tests.bench.defaults.failed_groups:grpo_failed"
--variant "some failed groups: credit.advantage=tests.bench.defaults.failed_groups:grpo_some_failed"
--variant "ngrpo: credit.advantage=tests.bench.defaults.failed_groups:ngrpo"

They are not declared, so their advantages of groups with equal values count. They are for rewards of whole rollouts (`broadcast`): with
values that differ from turn to turn, as those of `discounted`, early turns of solved tasks are below the batch's mean too.
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
    return _grpo_failed(groups, most=len(groups))


def grpo_some_failed(groups: list[list[Value]]) -> dict[str, float]:
    """`grpo_failed` for the first failed groups only: as many as groups that differ, and at least one. The others get 0.

    So most of the gradient does not come from failures, and a step trains on at most twice as many groups as with `grpo`.
    """
    return _grpo_failed(groups, most=max(1, sum(not is_flat(group) for group in groups)))


def ngrpo(groups: list[list[Value]], *, best: float = 1.0) -> dict[str, float]:
    """`grpo` with an imagined further attempt in each group, which earns ``best``, the largest reward (NGRPO, 2509.18851, without its
    asymmetric clipping). A group of n attempts that all earn 0 gets -1 / √(n + 1).
    """
    advantages: dict[str, float] = {}
    for group in groups:
        imagined = Value(call="", rollout="", value=max(best, *(v.value for v in group)), weight=1.0)
        mean, deviation = moments([*group, imagined])
        for v in group:
            advantages[v.call] = (v.value - mean) / (deviation + EPSILON)
    return advantages


def _grpo_failed(groups: list[list[Value]], *, most: int) -> dict[str, float]:
    calls = Counter(v.rollout for group in groups for v in group)
    batch = [replace(v, weight=1 / calls[v.rollout]) for group in groups for v in group]
    advantages = {v.call: 0.0 for v in batch}
    if is_flat(batch):
        return advantages
    mean, deviation = moments(batch)
    failed = [group for group in groups if is_flat(group) and group[0].value < mean]
    for v in (v for group in failed[:most] for v in group):
        advantages[v.call] = min(0.0, (v.value - mean) / (deviation + EPSILON))
    return advantages | ADVANTAGE_RULES["grpo"]([group for group in groups if not is_flat(group)])
