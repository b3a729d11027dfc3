"""LightningRL's credit assignment: computes an advantage per call from the rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, cast

from lightning_core.credit.advantage_rules import is_flat, rollouts
from lightning_core.credit.air import added, with_air
from lightning_core.credit.episode import Component, Episode, Value
from lightning_core.credit.grouping import equalise, group_values
from lightning_core.credit.registry import ADVANTAGE_RULES, RewardRule
from lightning_core.credit.rules import CreditRules
from lightning_core.errors import CreditError
from lightning_core.trace import check_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Values and advantages by call id, and metrics of the groups."""

    values: Mapping[str, float]
    """The value of each call, before any baseline."""
    advantages: Mapping[str, float]
    targets: Mapping[str, float] = field(default_factory=dict[str, float])
    """With a critic: the regression targets of its values."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


def assign_credit(
    episodes: Sequence[Episode], rules: CreditRules | None = None, *, values: Mapping[str, float] | None = None
) -> Credit:
    """Compute the value and the advantage of every call of ``episodes``.

    ``values``: the critic's value of every call by its id; required if ``rules.needs_values``. Advantages are computed before any
    rollout is dropped.
    """
    rules = rules or CreditRules()
    metrics: dict[str, float] = {}
    if rules.air is not None:
        given, episodes = episodes, [with_air(episode, rules.air) for episode in episodes]
        metrics["reward_air_sum"] = added(given, episodes)
    reward, advantage = rules.reward_rule, rules.advantage_rule
    arguments = rules.reward_arguments
    rewarded = {e.rollout: _parts(e, reward, arguments, values) for e in episodes}
    outcome_of = reward.depends_on if advantage.compares else None
    outcomes = {} if outcome_of is None else {e.rollout: outcome_of(e) for e in episodes}

    advantages = {t.call: 0.0 for e in episodes for t in e.transitions}
    for number, part in enumerate(_common_parts(rewarded)):
        by_call = _by_call(episodes, {rollout: parts[number].values for rollout, parts in rewarded.items()})
        groups = equalise(group_values(episodes, by_call, (*rules.keys, *part.group_by)), outcomes)
        prefix = f"{part.name}_" if part.name else ""
        metrics |= {f"{prefix}{name}": value for name, value in _metrics(groups).items()}
        if advantage.compares == "batch":
            groups = equalise(group_values(episodes, by_call, ()), outcomes)
        found = _compare(groups, rules)
        advantages = {call: before + part.weight * found[call] for call, before in advantages.items()}
    targets = {rollout: parts[0].targets for rollout, parts in rewarded.items() if parts[0].targets is not None}
    return Credit(
        values=_by_call(episodes, {rollout: parts[0].values for rollout, parts in rewarded.items()}),
        advantages=advantages,
        targets=_by_call([e for e in episodes if e.rollout in targets], targets),
        metrics=metrics,
    )


def _parts(
    episode: Episode, rule: RewardRule, arguments: Mapping[str, Any], expected: Mapping[str, float] | None
) -> Sequence[Component]:
    """The checked result of ``rule`` for ``episode``."""
    inputs: list[object] = [episode]
    if rule.needs_critic:
        inputs.append(_expected(episode, rule.name, expected or {}))
    found: Sequence[float] | Sequence[Component] = rule.function(*inputs, **arguments)
    parts = [part for part in found if isinstance(part, Component)]
    if not parts:
        parts = [Component(values=cast("Sequence[float]", found))]
    for part in parts:
        if len(part.values) != len(episode.transitions):
            raise CreditError(
                f"the reward rule {rule.name} returned {len(part.values)} values for the {len(episode.transitions)} calls of an "
                "episode; expected one per call"
            )
    return [
        replace(part, values=[check_reward(value) for value in part.values], group_by=tuple(part.group_by))
        for part in parts
    ]


def _expected(episode: Episode, rule: str, values: Mapping[str, float]) -> list[float]:
    missing = next((t.call for t in episode.transitions if t.call not in values), None)
    if missing is not None:
        raise CreditError(f"reward rule {rule!r} needs the critic's value of every call; call {missing!r} has no value")
    return [values[t.call] for t in episode.transitions]


def _common_parts(rewarded: Mapping[str, Sequence[Component]]) -> Sequence[Component]:
    """The first episode's components. Raises `CreditError` if those of another differ."""
    kinds = {tuple((p.name, p.weight, p.group_by) for p in parts) for parts in rewarded.values()}
    if len(kinds) > 1:
        raise CreditError(f"the reward rule returned different components for different episodes: {sorted(kinds)!r}")
    return next(iter(rewarded.values()), ())


def _by_call(episodes: Sequence[Episode], found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {t.call: value for e in episodes for t, value in zip(e.transitions, found[e.rollout], strict=True)}


def _compare(groups: list[list[Value]], rules: CreditRules) -> dict[str, float]:
    rule = rules.advantage_rule
    # A function that is not declared may give flat groups an advantage, such as one with a constant baseline.
    compares = rule.compares is not None and ADVANTAGE_RULES.get(rule.name) is rule
    flat = {v.call: 0.0 for group in groups if compares and is_flat(group) for v in group}
    compared = [group for group in groups if rule.whole_batch or group[0].call not in flat]
    result: object = rule.function(compared, **rules.advantage_arguments) if compared else {}
    if not isinstance(result, Mapping):
        raise CreditError(
            f"the advantage rule {rule.name} returned {type(result).__name__}, expected a dictionary from call id to advantage"
        )
    found = {**cast("Mapping[str, float]", result), **flat}
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


def _metrics(groups: Sequence[Sequence[Value]]) -> dict[str, float]:
    single = sum(rollouts(g) == 1 for g in groups)
    return {
        "groups": float(len(groups)),
        "groups_single": float(single),
        "groups_equal": float(sum(is_flat(g) for g in groups) - single),
    }
