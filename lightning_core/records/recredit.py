"""Credit computed again from stored rollouts: as trained, explained, or with other rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_core.credit import CreditRules, Episode, assign_by_policy
from lightning_core.records.store import CallCredit, Store
from lightning_core.transitions import trace_to_transitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The credit of one call: as trained, and with other rules."""

    ordinal: int
    """The rollout's number in the store."""
    trained: CallCredit
    value: float
    advantage: float

    @property
    def size(self) -> float:
        """How much the advantage changes."""
        return abs(self.advantage - self.trained.advantage)


def credited_steps(store: Store) -> list[int]:
    """The steps whose calls have credit."""
    trained = "SELECT DISTINCT step FROM credit INTERSECT SELECT DISTINCT step FROM rollouts WHERE phase = 'train'"
    return [row["step"] for row in store.select(f"{trained} ORDER BY step")]


def step_episodes(store: Store, step: int) -> list[Episode]:
    """The episodes that credit was assigned to in the update ``step``, with the trained calls."""
    trained = store.credit(step=step)
    calls, agents = {c.call for c in trained}, {c.agent for c in trained}
    episodes: list[Episode] = []
    for rollout in dict.fromkeys(c.rollout for c in trained):
        trace = store.trace(rollout)
        transitions = [t for t in trace_to_transitions(trace, agents=agents) if t.call in calls]
        episodes.append(Episode(trace=trace, transitions=transitions, rewards=trace.rewards))
    return episodes


def recredit(store: Store, step: int, rules: Mapping[str, CreditRules]) -> list[Change]:
    """The credit of all calls in the update ``step`` with ``rules``, which must not need a critic."""
    ordinals = {r.id: r.ordinal for r in store.rollouts(step=step, phase="train")}
    new = assign_by_policy(step_episodes(store, step), rules)
    return [
        Change(ordinal=ordinals[c.rollout], trained=c, value=new.values[c.call], advantage=new.advantages[c.call])
        for c in store.credit(step=step)
    ]
