"""From the rewards of episodes to one advantage for each call: the whole of LightningRL's credit assignment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from lightning_core.credit.advantage_rules import is_flat, rollouts
from lightning_core.credit.air import with_air
from lightning_core.credit.episode import Component, Episode, Value
from lightning_core.credit.grouping import equalised, group_values
from lightning_core.credit.rules import CreditRules
from lightning_core.errors import CreditError
from lightning_core.trace import check_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The result, by call id, and how the groups looked."""

    values: Mapping[str, float]
    """What each call is worth, before any baseline."""
    advantages: Mapping[str, float]
    targets: Mapping[str, float] = field(default_factory=dict[str, float])
    """With a critic: the values that it should have predicted."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


def assign_credit(
    episodes: Sequence[Episode], rules: CreditRules | None = None, *, values: Mapping[str, float] | None = None
) -> Credit:
    """Give every call of ``episodes`` a value and an advantage.

    ``values``: the critic's, for every call, where ``rules.needs_values``. Advantages are computed before anything is dropped.
    """
    rules = rules or CreditRules()
    if rules.air is not None:
        episodes = [with_air(episode, rules.air) for episode in episodes]
    reward, advantage = rules.reward_rule, rules.advantage_rule
    rewarded = {e.rollout: _parts(e, rules, values) for e in episodes}
    facts = reward.depends_on if advantage.compares else None
    outcomes = {} if facts is None else {e.rollout: facts(e) for e in episodes}

    advantages = {t.call: 0.0 for e in episodes for t in e.transitions}
    metrics: dict[str, float] = {}
    for number, part in enumerate(_alike(rewarded)):
        worth = _by_call(episodes, {rollout: parts[number].values for rollout, parts in rewarded.items()})
        groups = equalised(group_values(episodes, worth, (*rules.keys, *part.group_by)), outcomes)
        prefix = f"{part.name}_" if part.name else ""
        metrics |= {f"{prefix}{name}": value for name, value in _metrics(groups).items()}
        if advantage.compares == "batch":
            groups = equalised(group_values(episodes, worth, ()), outcomes)
        found = _compare(groups, rules)
        advantages = {call: before + part.weight * found[call] for call, before in advantages.items()}
    targets = {rollout: parts[0].targets for rollout, parts in rewarded.items() if parts[0].targets is not None}
    return Credit(
        values=_by_call(episodes, {rollout: parts[0].values for rollout, parts in rewarded.items()}),
        advantages=advantages,
        targets=_by_call([e for e in episodes if e.rollout in targets], targets),
        metrics=metrics,
    )


def _parts(episode: Episode, rules: CreditRules, expected: Mapping[str, float] | None) -> Sequence[Component]:
    """What the reward rule returns for ``episode``, checked."""
    rule = rules.reward_rule
    inputs: list[object] = [episode]
    if rule.needs_critic:
        inputs.append(_expected(episode, rule.name, expected or {}))
    found: Sequence[float] | Sequence[Component] = rule.function(*inputs, **rules.reward_arguments)
    parts = [part for part in found if isinstance(part, Component)]
    if not parts:
        parts = [Component(values=cast("Sequence[float]", found))]
    for part in parts:
        if len(part.values) != len(episode.transitions):
            raise CreditError(
                f"the reward rule {rule.name} gave {len(part.values)} values for the {len(episode.transitions)} calls of an episode"
            )
    return [replace(part, values=[check_reward(value) for value in part.values]) for part in parts]


def _expected(episode: Episode, rule: str, values: Mapping[str, float]) -> list[float]:
    missing = next((t.call for t in episode.transitions if t.call not in values), None)
    if missing is not None:
        raise CreditError(f"reward rule {rule!r} needs the critic's value of every call; {missing!r} has none")
    return [values[t.call] for t in episode.transitions]


def _alike(rewarded: Mapping[str, Sequence[Component]]) -> Sequence[Component]:
    """The parts of the first episode. Raises `CreditError` if another has other parts."""
    kinds = {tuple((p.name, p.weight, p.group_by) for p in parts) for parts in rewarded.values()}
    if len(kinds) > 1:
        raise CreditError(f"the reward rule returned different parts for different episodes: {sorted(kinds)!r}")
    return next(iter(rewarded.values()), ())


def _by_call(episodes: Sequence[Episode], found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {t.call: value for e in episodes for t, value in zip(e.transitions, found[e.rollout], strict=True)}


def _compare(groups: list[list[Value]], rules: CreditRules) -> dict[str, float]:
    rule = rules.advantage_rule
    found: dict[str, float] = rule.function(groups, **rules.advantage_arguments)
    missing = next((v.call for group in groups for v in group if v.call not in found), None)
    if missing is not None:
        raise CreditError(f"the advantage rule {rule.name} gave no advantage for the call {missing!r}")
    for call, advantage in found.items():
        if not math.isfinite(advantage):
            raise CreditError(f"the advantage rule {rule.name} gave {advantage!r} for the call {call!r}")
    return found


def _metrics(groups: Sequence[Sequence[Value]]) -> dict[str, float]:
    single = sum(rollouts(g) == 1 for g in groups)
    return {
        "groups": float(len(groups)),
        "groups_single": float(single),
        "groups_equal": float(sum(is_flat(g) for g in groups) - single),
    }
