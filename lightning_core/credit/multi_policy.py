"""Credit assignment for several policies, each with its own rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lightning_core.credit.assign import Credit, assign_credit
from lightning_core.credit.episode import Episode
from lightning_core.credit.facts import with_facts
from lightning_core.credit.rules import CreditRules


def assign_by_policy(
    episodes: Sequence[Episode], rules: Mapping[str, CreditRules], *, values: Mapping[str, float] | None = None
) -> Credit:
    """`assign_credit` with the rules of each policy; ``rules`` is by policy name.

    Each policy gets an episode's rewards in full, but only its own calls: groups and baselines contain no other policy's calls, the
    episode's return is shared, and the *last call* is the policy's last one. With several policies the metrics are named
    ``NAME/metric``.
    """
    if len(rules) == 1:
        (only,) = rules.values()
        return assign_credit(episodes, only, values=values)
    split = split_by_policy(episodes, rules)
    found = {name: assign_credit(own, rules[name], values=values) for name, own in split.items()}
    return Credit(
        values={call: value for credit in found.values() for call, value in credit.values.items()},
        advantages={call: value for credit in found.values() for call, value in credit.advantages.items()},
        targets={call: value for credit in found.values() for call, value in credit.targets.items()},
        metrics={f"{name}/{key}": value for name, credit in found.items() for key, value in credit.metrics.items()},
    )


def split_by_policy(episodes: Sequence[Episode], policies: Collection[str]) -> dict[str, Sequence[Episode]]:
    """For each policy, the episodes that its credit is assigned to: with its own calls and all rewards."""
    found = with_facts(episodes)
    return {name: found if len(policies) == 1 else _own(found, name) for name in policies}


def _own(episodes: Sequence[Episode], policy: str) -> list[Episode]:
    """The episodes with calls of ``policy``, reduced to these calls."""
    own = [replace(e, transitions=[t for t in e.transitions if t.policy == policy]) for e in episodes]
    return [e for e in own if e.transitions]
