"""Rewards that are compared on their own, such as the criteria of a judge.

Each is normalized within its groups before the advantages are added with their weights (GDPO, arXiv 2601.05242): in the sum of all
rewards, one with a small variance would hardly count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_core.credit.episode import Episode
from lightning_core.credit.facts import STEP_FACTS
from lightning_core.trace import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm:
    """The rewards named ``name``: their advantages are computed apart from other rewards, and added."""

    name: str
    weight: float = 1.0
    """Coefficient of the advantages."""
    agents: Sequence[str] | None = None
    """Agents whose calls get advantages from it; None: all trained agents."""


def split_terms(
    episodes: Sequence[Episode], terms: Sequence[RewardTerm]
) -> Iterator[tuple[RewardTerm | None, Sequence[Episode]]]:
    """``episodes`` with all other rewards (None), then for each term with its rewards alone.

    ``episodes``: with facts. A term's episodes are those that have its reward, with the calls of its agents.
    """
    if not terms:
        yield None, episodes
        return
    names = {term.name for term in terms}
    yield None, _keep_rewards(episodes, lambda reward: reward.name not in names)
    for term in terms:
        alone = _keep_rewards(episodes, lambda reward, own=term.name: reward.name == own)
        found = [_without_arrays(_of_agents(e, term)) for e in alone]
        yield term, [episode for episode in found if episode.rewards and episode.transitions]


def _keep_rewards(episodes: Sequence[Episode], kept: Callable[[Reward], bool]) -> list[Episode]:
    """``episodes`` and their facts with the rewards that are ``kept``."""
    facts = {
        name: fact.keep_rewards(kept) for e in episodes[:1] for name, fact in e.facts.items() if name in STEP_FACTS
    }
    return [replace(e, rewards=[r for r in e.rewards if kept(r)], facts={**e.facts, **facts}) for e in episodes]


def _without_arrays(episode: Episode) -> Episode:
    """``episode`` without what was measured at its calls, which is compared with all other rewards and not within a term."""
    if not any(call.arrays for call in episode.trace.calls):
        return episode
    calls = tuple(replace(call, arrays={}) for call in episode.trace.calls)
    return replace(episode, trace=replace(episode.trace, calls=calls))


def _of_agents(episode: Episode, term: RewardTerm) -> Episode:
    if term.agents is None:
        return episode
    return replace(episode, transitions=[t for t in episode.transitions if t.agent in term.agents])
