"""Credit computed again from stored rollouts: as trained, explained, or with other rules."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_core.config import Config
from lightning_core.config.build_rules import policy_rules
from lightning_core.config.signal_sections import with_derived
from lightning_core.credit import Episode, assign_by_policy
from lightning_core.records.store import CallCredit, Store
from lightning_core.signals.forks.section import forks_of
from lightning_core.trace import Trace
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
        """The size of the advantage's change."""
        return abs(self.advantage - self.trained.advantage)


def credited_steps(store: Store) -> list[int]:
    """The steps whose calls have credit."""
    trained = "SELECT DISTINCT step FROM credit INTERSECT SELECT DISTINCT step FROM rollouts WHERE phase = 'train'"
    return [row["step"] for row in store.select(f"{trained} ORDER BY step")]


def step_episodes(
    store: Store, step: int, *, rollouts: Collection[str] | None = None, traces: Mapping[str, Trace] | None = None
) -> list[Episode]:
    """The episodes of the update ``step`` with the trained calls, as recorded. See `with_derived` for the rewards that are not.

    ``rollouts``: ids of those to read; None: all. ``traces``: those that are already read, by rollout.
    """
    known = traces or {}
    trained = store.credit(step=step)
    calls, agents = {c.call for c in trained}, {c.agent for c in trained}
    episodes: list[Episode] = []
    for rollout in dict.fromkeys(c.rollout for c in trained if rollouts is None or c.rollout in rollouts):
        trace = known.get(rollout) or store.trace(rollout)
        transitions = [t for t in trace_to_transitions(trace, agents=agents) if t.call in calls]
        episodes.append(Episode(trace=trace, transitions=transitions, rewards=trace.rewards))
    return episodes


def recredit(store: Store, step: int, config: Config) -> list[Change]:
    """The credit of all calls in the update ``step`` with the rules of ``config``, which must not need a critic.

    Calls of forks are among them if ``rollouts.forks`` is set.
    """
    phases = {"train"} if forks_of(config.rollouts) is None else {"train", "fork"}
    ordinals = {r.id: r.ordinal for r in store.rollouts(step=step) if r.phase in phases}
    episodes = with_derived(config, step_episodes(store, step, rollouts=ordinals))
    new = assign_by_policy(episodes, policy_rules(config))
    return [
        Change(ordinal=ordinals[c.rollout], trained=c, value=new.values[c.call], advantage=new.advantages[c.call])
        for c in store.credit(step=step)
        if c.rollout in ordinals
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentChange:
    """The changes of the advantages of an agent's calls."""

    agent: str | None
    """None: all agents."""
    calls: int
    before: float
    after: float
    """Mean absolute advantage as trained, and with other rules."""
    correlation: float | None
    """Pearson correlation of the advantages before and after; None if either is constant."""
    flipped: int
    """Number of calls whose advantage gets the other sign."""
    from_zero: int
    to_zero: int
    """Number of calls whose advantage is 0 on one side only."""


def compare_agents(changes: Sequence[Change]) -> list[AgentChange]:
    """The changes by agent in order of first appearance, then of all agents if there are several."""
    by_agent: dict[str | None, list[Change]] = {}
    for change in changes:
        by_agent.setdefault(change.trained.agent, []).append(change)
    groups: Mapping[str | None, Sequence[Change]] = by_agent if len(by_agent) < 2 else {**by_agent, None: changes}
    return [_agent_change(agent, group) for agent, group in groups.items()]


def most_changed(changes: Sequence[Change], count: int) -> list[Change]:
    """The ``count`` calls whose advantages change most; without those that do not change."""
    return sorted((c for c in changes if c.size > 1e-6), key=lambda c: -c.size)[:count]


def _agent_change(agent: str | None, changes: Sequence[Change]) -> AgentChange:
    before, after = [c.trained.advantage for c in changes], [c.advantage for c in changes]
    pairs = list(zip(before, after, strict=True))
    return AgentChange(
        agent=agent,
        calls=len(changes),
        before=sum(map(abs, before)) / len(changes),
        after=sum(map(abs, after)) / len(changes),
        correlation=_correlation(before, after),
        flipped=sum(a * b < 0 for a, b in pairs),
        from_zero=sum(not a and b != 0 for a, b in pairs),
        to_zero=sum(a != 0 and not b for a, b in pairs),
    )


def _correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    spread = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / spread if spread else None
