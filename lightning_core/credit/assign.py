"""LightningRL's credit assignment: computes an advantage per call from the rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_core.credit.advantage_rules import is_flat, rollouts
from lightning_core.credit.components import Compared, compare_episodes
from lightning_core.credit.episode import Episode, Value
from lightning_core.credit.rules import CreditRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Values and advantages by call id, and metrics of the groups."""

    values: Mapping[str, float]
    """The value of each call, before any baseline."""
    advantages: Mapping[str, float]
    targets: Mapping[str, float] = field(default_factory=dict[str, float])
    """The regression targets of a critic's values."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


def assign_credit(
    episodes: Sequence[Episode], rules: CreditRules | None = None, *, values: Mapping[str, float] | None = None
) -> Credit:
    """Compute the value and the advantage of every call of ``episodes``.

    ``values``: the critic's value of every call by its id; None: as in ``facts["critic"]`` of the episodes. Advantages are computed
    before any rollout is dropped.
    """
    rules = rules or CreditRules()
    metrics: dict[str, float] = {}
    found = compare_episodes(episodes, rules, values=values)
    advantages = dict.fromkeys(found.values, 0.0)
    for one in found.compared:
        for call, weight in one.weights.items():
            advantages[call] += weight * one.advantages[call]
        metrics |= _metrics(one)
    if found.compared:
        metrics["groups_wasted"] = _wasted(found.compared[0].keyed, advantages)
    return Credit(values=found.values, advantages=advantages, targets=found.targets, metrics=metrics)


def _wasted(groups: Sequence[Sequence[Value]], advantages: Mapping[str, float]) -> float:
    """The number of groups whose calls all have the advantage 0, the sum of all components."""
    return sum(not any(advantages[v.call] for v in group) for group in groups)


def _metrics(compared: Compared) -> dict[str, float]:
    prefix, groups = f"{compared.component.name}_" if compared.component.name else "", compared.keyed
    single = sum(rollouts(g) == 1 for g in groups)
    return {
        f"{prefix}groups": float(len(groups)),
        f"{prefix}groups_single": float(single),
        f"{prefix}groups_equal": float(sum(is_flat(g) for g in groups) - single),
    }
