"""Compares the values of calls: one comparison for each component of the reward rule's result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_core.credit.apply import advantages_of, common_parts, flat_calls, values_of
from lightning_core.credit.episode import Component, Episode, Value
from lightning_core.credit.grouping import equalise, group_values
from lightning_core.credit.rules import CreditRules
from lightning_core.credit.trees import with_trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One component of the values, compared by the advantage rule."""

    part: Component
    """The component of the first episode: name, weight, group keys."""
    keyed: Sequence[Sequence[Value]]
    """The groups of calls that agree in all group keys."""
    groups: Sequence[Sequence[Value]]
    """The groups that the advantage rule got: ``keyed``, or the whole batch as one group."""
    advantages: Mapping[str, float]
    """By call id, without the component's weight."""
    weights: Mapping[str, float]
    """The coefficients of the advantages by call id, without the calls that the component does not count for (`Component.share`)."""


def compare_episodes(
    episodes: Sequence[Episode], rules: CreditRules, *, values: Mapping[str, float] | None = None
) -> tuple[Mapping[str, Sequence[Component]], Sequence[Compared]]:
    """The components of each rollout's values, and what the advantage rule made of each component.

    The rewards of AIR must already be among those of ``episodes``.
    """
    episodes = with_trees(episodes)
    reward, advantage = rules.reward_rule, rules.advantage_rule
    arguments = rules.reward_arguments
    rewarded = {e.rollout: values_of(e, reward, arguments, values) for e in episodes}
    outcome_of = reward.depends_on if advantage.compares else None
    outcomes = {} if outcome_of is None else {e.rollout: outcome_of(e) for e in episodes}

    found: list[tuple[Component, list[list[Value]], list[list[Value]]]] = []
    for number, part in enumerate(common_parts(rewarded)):
        values_by_call = by_call(episodes, {rollout: parts[number].values for rollout, parts in rewarded.items()})
        keyed = equalise(group_values(episodes, values_by_call, (*rules.keys, *part.group_by)), outcomes)
        groups = keyed
        if advantage.compares == "batch":
            groups = equalise(group_values(episodes, values_by_call, ()), outcomes)
        found.append((part, keyed, groups))
    weights = _weights([(part, groups) for part, _, groups in found], rules)
    return rewarded, [
        Compared(part=part, keyed=keyed, groups=groups, advantages=advantages_of(groups, rules), weights=own)
        for (part, keyed, groups), own in zip(found, weights, strict=True)
    ]


def _weights(found: Sequence[tuple[Component, list[list[Value]]]], rules: CreditRules) -> list[dict[str, float]]:
    """For each component and its groups, the coefficients of its advantages; see `Component.share`."""
    counted: list[set[str]] = []
    total: Counter[str] = Counter()
    for part, groups in found:
        counted.append({v.call for group in groups for v in group})
        if part.share is not None:
            counted[-1] -= flat_calls(groups, rules)
            total.update(dict.fromkeys(counted[-1], part.share))
    return [
        {call: part.weight * (1.0 if part.share is None else part.share / total[call]) for call in calls}
        for (part, _), calls in zip(found, counted, strict=True)
    ]


def by_call(episodes: Sequence[Episode], found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """``found``, which has the values of each rollout's transitions, by call id."""
    return {t.call: value for e in episodes for t, value in zip(e.transitions, found[e.rollout], strict=True)}
