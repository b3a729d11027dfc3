"""Credit assignment for several policies, each with its own rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_core.credit.air import air_sum, with_air
from lightning_core.credit.assign import Credit, assign_credit
from lightning_core.credit.episode import Episode
from lightning_core.credit.facts import with_facts
from lightning_core.credit.rules import CreditRules


def assign_by_policy(
    episodes: Sequence[Episode], rules: Mapping[str, CreditRules], *, values: Mapping[str, float] | None = None
) -> Credit:
    """`assign_credit` with the rules of each policy; ``rules`` is by policy name.

    Each policy gets an episode's rewards in full, but only its own calls: groups and baselines contain no other policy's calls, the
    episode's return is shared, and the *last call* is the policy's last one. Intermediate rewards are computed first, each policy's by
    its own rules. With several policies the metrics are named ``NAME/metric``.
    """
    if len(rules) == 1:
        (only,) = rules.values()
        return assign_credit(episodes, only, values=values)
    split = split_by_policy(episodes, rules)
    air = {f"{name}/reward_air_sum": air_sum(split[name][0]) for name, own in rules.items() if own.air is not None}
    found = {name: assign_credit(own, own_rules, values=values) for name, (own, own_rules) in split.items()}
    return Credit(
        values={call: value for credit in found.values() for call, value in credit.values.items()},
        advantages={call: value for credit in found.values() for call, value in credit.advantages.items()},
        targets={call: value for credit in found.values() for call, value in credit.targets.items()},
        metrics=air
        | {f"{name}/{key}": value for name, credit in found.items() for key, value in credit.metrics.items()},
    )


def split_by_policy(
    episodes: Sequence[Episode], rules: Mapping[str, CreditRules]
) -> dict[str, tuple[Sequence[Episode], CreditRules]]:
    """The episodes and rules of each policy: episodes have its own calls and all rewards.

    The rewards include AIR's, so the rules have no ``air``.
    """
    rewarded = with_facts([_with_air(episode, rules) for episode in episodes])
    return {
        name: (rewarded if len(rules) == 1 else _own(rewarded, name), replace(own, air=None))
        for name, own in rules.items()
    }


def _own(episodes: Sequence[Episode], policy: str) -> list[Episode]:
    """The episodes with calls of ``policy``, reduced to these calls."""
    own = [replace(e, transitions=[t for t in e.transitions if t.policy == policy]) for e in episodes]
    return [e for e in own if e.transitions]


def _with_air(episode: Episode, rules: Mapping[str, CreditRules]) -> Episode:
    rewards = list(episode.rewards)
    for name, own in rules.items():
        if own.air is not None:
            part = replace(episode, transitions=[t for t in episode.transitions if t.policy == name], rewards=())
            rewards += with_air(part, own.air, policy=name).rewards
    return replace(episode, rewards=rewards)
