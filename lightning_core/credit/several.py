"""Credit where agents learn with different policies: each policy's calls by rules of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_core.credit.air import with_air
from lightning_core.credit.assign import Credit, assign_credit
from lightning_core.credit.episode import Episode
from lightning_core.credit.rules import CreditRules


def assign_by_policy(
    episodes: Sequence[Episode], rules: Mapping[str, CreditRules], *, values: Mapping[str, float] | None = None
) -> Credit:
    """`assign_credit` by the rules of each policy, whose names are in ``rules``; its groups and baselines are its own calls'.

    A policy sees an episode with all its rewards and only its own calls: the episode's return is that of the team, the *last call* is
    its last one. Intermediate rewards are found first, among the calls of all, by each policy's rules for its own. The metrics are
    called ``NAME/metric``, if there are several.
    """
    if len(rules) == 1:
        (only,) = rules.values()
        return assign_credit(episodes, only, values=values)
    rewarded = [_with_air(episode, rules) for episode in episodes]
    found = {
        name: assign_credit(_own(rewarded, name), replace(own, air=None), values=values) for name, own in rules.items()
    }
    return Credit(
        values={call: value for credit in found.values() for call, value in credit.values.items()},
        advantages={call: value for credit in found.values() for call, value in credit.advantages.items()},
        targets={call: value for credit in found.values() for call, value in credit.targets.items()},
        metrics={f"{name}/{key}": value for name, credit in found.items() for key, value in credit.metrics.items()},
    )


def _own(episodes: Sequence[Episode], policy: str) -> list[Episode]:
    """The episodes that ``policy`` spoke in, each with its calls alone."""
    own = [replace(e, transitions=[t for t in e.transitions if t.policy == policy]) for e in episodes]
    return [e for e in own if e.transitions]


def _with_air(episode: Episode, rules: Mapping[str, CreditRules]) -> Episode:
    rewards = list(episode.rewards)
    for name, own in rules.items():
        for part in _own([episode], name):
            if own.air is not None:
                rewards += with_air(replace(part, rewards=()), own.air).rewards
    return replace(episode, rewards=rewards)
