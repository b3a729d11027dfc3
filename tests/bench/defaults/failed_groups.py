"""Advantage rules to be measured: groups in which all attempts failed are compared with the batch, or with an imagined success.

--variant "failed groups: credit.advantage=tests.bench.defaults.failed_groups:grpo_failed"
--variant "some failed groups: credit.advantage=tests.bench.defaults.failed_groups:grpo_some_failed"
--variant "ngrpo: credit.advantage=tests.bench.defaults.failed_groups:ngrpo"

All are for rewards of whole rollouts (`broadcast`). The first is one of the example rules; recorded runs name it by this module.
"""

from __future__ import annotations

from examples.rules.failed_groups import grpo_failed
from lightning_core.credit import Value, advantage_rule
from lightning_core.credit.advantage_rules import EPSILON, is_flat, moments

__all__ = ["grpo_failed", "grpo_some_failed", "ngrpo"]


@advantage_rule("grpo-some-failed", whole_batch=True, flat_groups=True)
def grpo_some_failed(groups: list[list[Value]]) -> dict[str, float]:
    """`grpo_failed` for the first failed groups of the step only: as many as groups that differ, and at least one. The others get 0.

    So most of the gradient does not come from failures, and a step trains on at most twice as many groups as with `grpo`.
    """
    found = grpo_failed(groups)
    failed = [group for group in groups if is_flat(group) and found[group[0].call]]
    for group in failed[max(1, len(groups) - sum(map(is_flat, groups))) :]:
        found |= {v.call: 0.0 for v in group}
    return found


@advantage_rule("ngrpo", flat_groups=True)
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
