"""Explains a call's advantage: episode → value → baseline → advantage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_core.credit.advantage_rules import moments
from lightning_core.credit.components import compare_episodes
from lightning_core.credit.episode import Episode, Value
from lightning_core.credit.multi_policy import split_by_policy
from lightning_core.credit.rules import CreditRules
from lightning_core.trace import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupExplanation:
    """The comparison of a call's value with its group's, for one component of the reward rule."""

    component: str
    """The component's name; empty for a rule with one component."""
    weight: float
    """Coefficient of the component's advantage."""
    value: float
    members: Sequence[Value]
    """The values that were compared, the call's own among them."""
    mean: float
    deviation: float
    """Mean and standard deviation of the members' values; each rollout counts once."""
    advantage: float
    """Without the weight, and before advantages are accumulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The credit of one call. Its advantage is the sum of ``weight · advantage`` over ``groups``, plus ``accumulated``."""

    rewards: Sequence[Reward]
    """The rewards that the reward rule read: the episode's, the agents', the calls', and those that signals add."""
    groups: Sequence[GroupExplanation]
    advantage: float
    accumulated: float = 0.0
    """The part that advantages of later calls add, with a rule that accumulates them (`Component.accumulate`)."""


def explain_credit(
    episodes: Sequence[Episode], rules: Mapping[str, CreditRules], *, values: Mapping[str, float] | None = None
) -> dict[str, Explanation]:
    """The explanation of every call of ``episodes`` by its id, with the rules of each policy (as in `assign_by_policy`).

    ``values``: the critic's value of every call, for reward rules that need it.
    """
    found: dict[str, Explanation] = {}
    for name, own in split_by_policy(episodes, rules).items():
        found |= _explain(own, rules[name], values)
    return found


def _explain(
    episodes: Sequence[Episode], rules: CreditRules, values: Mapping[str, float] | None
) -> dict[str, Explanation]:
    groups: dict[str, list[GroupExplanation]] = {t.call: [] for e in episodes for t in e.transitions}
    accumulated = dict.fromkeys(groups, 0.0)
    for one in compare_episodes(episodes, rules, values=values).compared:
        for members in one.groups:
            mean, deviation = moments(members)
            for member in (v for v in members if v.call in one.weights):
                groups[member.call].append(
                    GroupExplanation(
                        component=one.component.name,
                        weight=one.weights[member.call],
                        value=member.value,
                        members=members,
                        mean=mean,
                        deviation=deviation,
                        advantage=one.own[member.call],
                    )
                )
        if one.component.accumulate is not None:
            for call, advantage in one.advantages.items():
                accumulated[call] += one.weights[call] * (advantage - one.own.get(call, 0.0))
    return {
        t.call: Explanation(
            rewards=e.rewards,
            groups=groups[t.call],
            advantage=sum(group.weight * group.advantage for group in groups[t.call]) + accumulated[t.call],
            accumulated=accumulated[t.call],
        )
        for e in episodes
        for t in e.transitions
    }
