"""Calls the rules of a run and checks what they return, since rules can be functions of the user."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Real
from typing import Any, cast

from lightning_core.credit.advantage_rules import is_flat
from lightning_core.credit.episode import Component, Episode, Value
from lightning_core.credit.registry import ADVANTAGE_RULES, GroupKey, RewardRule
from lightning_core.credit.rules import CreditRules
from lightning_core.errors import CreditError, RewardError, show
from lightning_core.trace import check_reward


def values_of(
    episode: Episode, rule: RewardRule, arguments: Mapping[str, Any], expected: Mapping[str, float] | None
) -> Sequence[Component]:
    """The checked result of ``rule`` for ``episode``."""
    inputs: list[object] = [episode]
    if "critic" in rule.needs:
        inputs.append(_expected(episode, rule.name, episode.facts.get("critic", {}) if expected is None else expected))
    result: object = rule(*inputs, **arguments)
    if not isinstance(result, Iterable) or isinstance(result, str | Mapping | Set):
        raise CreditError(f"the reward rule {rule.name!r} returned {show(result)}; expected one value per call")
    found = list(cast("Iterable[object]", result))
    components = [component for component in found if isinstance(component, Component)]
    if not components:
        components = [Component(values=cast("Sequence[float]", found))]
    for component in components:
        if len(component.values) != len(episode.transitions):
            raise CreditError(
                f"the reward rule {rule.name} returned {len(component.values)} values for the {len(episode.transitions)} calls of an "
                "episode; expected one per call"
            )
    return [
        replace(
            component,
            values=[
                _checked(value, t.call, rule.name)
                for value, t in zip(component.values, episode.transitions, strict=True)
            ],
            group_by=tuple(component.group_by),
        )
        for component in components
    ]


def _checked(value: float | None, call: str, rule: str) -> float | None:
    try:
        return None if value is None else check_reward(value)
    except RewardError as error:
        raise RewardError(f"the reward rule {rule!r} returned {show(value)} for call {call!r}: {error}") from None


def _expected(episode: Episode, rule: str, values: Mapping[str, float]) -> list[float]:
    missing = next((t.call for t in episode.transitions if t.call not in values), None)
    if missing is not None:
        raise CreditError(f"reward rule {rule!r} needs the critic's value of every call; call {missing!r} has no value")
    return [values[t.call] for t in episode.transitions]


def keys_of(episode: Episode, rule: GroupKey) -> Sequence[str]:
    """The checked result of ``rule`` for ``episode``: one key for each call."""
    result: object = rule(episode)
    if not isinstance(result, Iterable) or isinstance(result, str | Mapping | Set):
        raise CreditError(f"the group key {rule.name} returned {show(result)}; expected a list with one key per call")
    found = list(cast("Iterable[str]", result))
    if len(found) != len(episode.transitions):
        raise CreditError(
            f"the group key {rule.name} returned {len(found)} keys for the {len(episode.transitions)} calls of an episode; "
            "expected one per call"
        )
    for key in found:
        try:
            hash(key)
        except TypeError:
            raise CreditError(f"the group key {rule.name} returned {show(key)} for a call; expected a text") from None
    return found


def common_components(rewarded: Mapping[str, Sequence[Component]]) -> Sequence[Component]:
    """The first episode's components. Raises `CreditError` if another episode's differ."""
    kinds = {
        tuple((p.name, p.weight, p.share, p.group_by, p.accumulate) for p in components)
        for components in rewarded.values()
    }
    if len(kinds) > 1:
        found = sorted(map(repr, kinds))
        raise CreditError(f"the reward rule returned different components for different episodes: {', '.join(found)}")
    return next(iter(rewarded.values()), ())


def flat_calls(groups: Sequence[Sequence[Value]], rules: CreditRules) -> set[str]:
    """The calls of flat groups, whose advantage is 0: they have nothing to be compared with.

    None if the advantage rule of ``rules`` does not compare, or decides about them itself.
    """
    rule = rules.advantage_rule
    # A function that is not declared may give flat groups an advantage, such as one with a constant baseline.
    compares = rule.compares is not None and not rule.flat_groups and ADVANTAGE_RULES.get(rule.name) is rule
    return {v.call for group in groups if compares and is_flat(group) for v in group}


def advantages_of(groups: list[list[Value]], rules: CreditRules) -> dict[str, float]:
    """The checked result of the advantage rule of ``rules`` for ``groups``; 0 for `flat_calls`."""
    rule = rules.advantage_rule
    flat = dict.fromkeys(flat_calls(groups, rules), 0.0)
    compared = [group for group in groups if rule.whole_batch or group[0].call not in flat]
    given = {v.call for group in compared for v in group}
    result: object = rule(compared, **rules.advantage_arguments) if compared else {}
    if not isinstance(result, Mapping):
        raise CreditError(
            f"the advantage rule {rule.name} returned {type(result).__name__}, expected a dictionary from call id to advantage"
        )
    credited = cast("Mapping[str, float]", result)
    if unknown := credited.keys() - given:
        raise CreditError(
            f"the advantage rule {rule.name} returned an advantage for {min(unknown, key=str)!r}, which is not a call of the groups that "
            "it was given; expected one per call, by the call's id"
        )
    found = {**credited, **flat}
    missing = next((v.call for group in groups for v in group if v.call not in found), None)
    if missing is not None:
        raise CreditError(
            f"the advantage rule {rule.name} returned no advantage for call {missing!r}; expected one per call"
        )
    for call, advantage in found.items():
        if not isinstance(advantage, Real) or not math.isfinite(advantage):
            raise CreditError(
                f"the advantage rule {rule.name} returned {advantage!r} for call {call!r}; expected a finite number"
            )
    return found
