"""LightningRL's credit assignment: computes an advantage per call from the rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_core.credit.advantage_rules import is_flat, rollouts
from lightning_core.credit.air import air_sum, with_air
from lightning_core.credit.apply import advantages_of, common_parts, values_of
from lightning_core.credit.episode import Component, Episode, Value
from lightning_core.credit.grouping import equalise, group_values
from lightning_core.credit.rules import CreditRules
from lightning_core.credit.trees import with_trees


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
        episodes = [with_air(episode, rules.air) for episode in episodes]
        metrics["reward_air_sum"] = air_sum(episodes)
    rewarded, compared = compare_episodes(episodes, rules, values=values)
    advantages = {t.call: 0.0 for e in episodes for t in e.transitions}
    for found in compared:
        advantages = {call: before + found.part.weight * found.advantages[call] for call, before in advantages.items()}
    targets = {rollout: parts[0].targets for rollout, parts in rewarded.items() if parts[0].targets is not None}
    for found in compared:
        metrics |= _metrics(found)
    if compared:
        metrics["groups_wasted"] = _wasted(compared[0].keyed, advantages)
    return Credit(
        values=_by_call(episodes, {rollout: parts[0].values for rollout, parts in rewarded.items()}),
        advantages=advantages,
        targets=_by_call([e for e in episodes if e.rollout in targets], targets),
        metrics=metrics,
    )


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

    compared: list[Compared] = []
    for number, part in enumerate(common_parts(rewarded)):
        by_call = _by_call(episodes, {rollout: parts[number].values for rollout, parts in rewarded.items()})
        keyed = equalise(group_values(episodes, by_call, (*rules.keys, *part.group_by)), outcomes)
        groups = keyed
        if advantage.compares == "batch":
            groups = equalise(group_values(episodes, by_call, ()), outcomes)
        compared.append(Compared(part=part, keyed=keyed, groups=groups, advantages=advantages_of(groups, rules)))
    return rewarded, compared


def _by_call(episodes: Sequence[Episode], found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {t.call: value for e in episodes for t, value in zip(e.transitions, found[e.rollout], strict=True)}


def _wasted(groups: Sequence[Sequence[Value]], advantages: Mapping[str, float]) -> float:
    """The number of groups whose calls all have the advantage 0, the sum of all components."""
    return sum(not any(advantages[v.call] for v in group) for group in groups)


def _metrics(compared: Compared) -> dict[str, float]:
    prefix, groups = f"{compared.part.name}_" if compared.part.name else "", compared.keyed
    single = sum(rollouts(g) == 1 for g in groups)
    return {
        f"{prefix}groups": float(len(groups)),
        f"{prefix}groups_single": float(single),
        f"{prefix}groups_equal": float(sum(is_flat(g) for g in groups) - single),
    }
