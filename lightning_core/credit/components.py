"""Turns rewards into compared values, one component after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_core.credit.checked_rules import advantages_of, common_components, flat_calls, values_of
from lightning_core.credit.episode import Accumulate, Component, Episode, Value
from lightning_core.credit.facts import with_facts
from lightning_core.credit.grouping import equalise, group_values
from lightning_core.credit.reward_terms import RewardTerm, split_terms
from lightning_core.credit.rules import CreditRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One component of the values, compared by the advantage rule."""

    component: Component
    """The component of the first episode: name, weight, group keys."""
    keyed: Sequence[Sequence[Value]]
    """The groups of calls that agree in all group keys."""
    groups: Sequence[Sequence[Value]]
    """The groups that the advantage rule got: ``keyed``, or the whole batch as one group."""
    own: Mapping[str, float]
    """The result of the advantage rule, by id of the calls that were compared."""
    advantages: Mapping[str, float]
    """By call id, without the component's weight. A term has values for its own calls only. They differ from ``own`` if the component
    accumulates them (`Component.accumulate`)."""
    weights: Mapping[str, float]
    """The coefficients of the advantages by call id, without the calls that the component does not count for (`Component.share`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueComparison:
    """The values of all calls, and how the advantage rule compared them."""

    values: Mapping[str, float]
    """The value of the first component plus the terms' values times their weights, by call id."""
    targets: Mapping[str, float]
    """The regression targets of a critic's values, by call id."""
    compared: Sequence[Compared]


def compare_episodes(
    episodes: Sequence[Episode], rules: CreditRules, *, values: Mapping[str, float] | None = None
) -> ValueComparison:
    """The values of the calls of ``episodes``, compared by ``rules``: first all rewards outside terms, then each term."""
    episodes = with_facts(episodes)
    totals = {t.call: 0.0 for e in episodes for t in e.transitions}
    targets: dict[str, float] = {}
    compared: list[Compared] = []
    for term, own in split_terms(episodes, rules.terms):
        rewarded = {e.rollout: values_of(e, rules.reward_rule, rules.reward_arguments, values) for e in own}
        first = {rollout: components[0] for rollout, components in rewarded.items()}
        found = _by_call(own, {rollout: component.values for rollout, component in first.items()})
        totals |= {call: totals[call] + (1.0 if term is None else term.weight) * v for call, v in found.items()}
        learned = {rollout: c.targets for rollout, c in first.items() if c.targets is not None}
        targets |= _by_call([e for e in own if e.rollout in learned], learned)
        compared += _compare(own, rules, rewarded, term)
    return ValueComparison(values=totals, targets=targets, compared=compared)


def _compare(
    episodes: Sequence[Episode],
    rules: CreditRules,
    rewarded: Mapping[str, Sequence[Component]],
    term: RewardTerm | None,
) -> list[Compared]:
    advantage = rules.advantage_rule
    outcome_of = rules.reward_rule.depends_on if advantage.compares else None
    outcomes = {} if outcome_of is None else {e.rollout: outcome_of(e) for e in episodes}

    found: list[tuple[Component, list[list[Value]], list[list[Value]]]] = []
    for number, component in enumerate(common_components(rewarded)):
        by_call = _by_call(episodes, {rollout: components[number].values for rollout, components in rewarded.items()})
        keyed = equalise(group_values(episodes, by_call, (*rules.keys, *component.group_by)), outcomes)
        groups = keyed
        if advantage.compares == "batch":
            groups = equalise(group_values(episodes, by_call, ()), outcomes)
        if term is not None:
            name = f"{term.name}_{component.name}" if component.name else term.name
            component = replace(component, name=name, weight=component.weight * term.weight)
        found.append((component, keyed, groups))
    compared: list[Compared] = []
    for (component, keyed, groups), weights in zip(found, _weights([(p, g) for p, _, g in found], rules), strict=True):
        own = advantages_of(groups, rules)
        advantages = own if component.accumulate is None else _accumulated(episodes, own, component.accumulate)
        if component.accumulate is not None:
            weights = dict.fromkeys(advantages, component.weight)
        compared.append(
            Compared(component=component, keyed=keyed, groups=groups, own=own, advantages=advantages, weights=weights)
        )
    return compared


def _accumulated(
    episodes: Sequence[Episode], advantages: Mapping[str, float], accumulate: Accumulate
) -> dict[str, float]:
    found: dict[str, float] = {}
    for e in episodes:
        sums = accumulate([advantages.get(t.call) for t in e.transitions])
        found |= {t.call: value for t, value in zip(e.transitions, sums, strict=True)}
    return found


def _weights(found: Sequence[tuple[Component, list[list[Value]]]], rules: CreditRules) -> list[dict[str, float]]:
    """The coefficients of each component's advantages, by group; see `Component.share`."""
    counted: list[set[str]] = []
    total: Counter[str] = Counter()
    for component, groups in found:
        counted.append({v.call for group in groups for v in group})
        if component.share is not None:
            counted[-1] -= flat_calls(groups, rules)
            total.update(dict.fromkeys(counted[-1], component.share))
    return [
        {call: component.weight * (1.0 if component.share is None else component.share / total[call]) for call in calls}
        for (component, _), calls in zip(found, counted, strict=True)
    ]


def _by_call(episodes: Sequence[Episode], found: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """The values by call id, without those that are None."""
    pairs = ((t.call, value) for e in episodes for t, value in zip(e.transitions, found[e.rollout], strict=True))
    return {call: value for call, value in pairs if value is not None}
