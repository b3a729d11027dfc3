"""Reward rules: compute the value of each trained call of an episode."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated

from annotated_types import Ge, Gt, Le

from lightning_core.credit.episode import Component, Episode, episode_return
from lightning_core.credit.registry import Example, reward_rule

Gamma = Annotated[float, Gt(0), Le(1), Example(0.95)]


def rewards_of(episode: Episode) -> Hashable:
    """All rewards of the episode by place; see `Episode.outcome`."""
    return episode.outcome


@reward_rule("broadcast", depends_on=rewards_of)
def broadcast(episode: Episode) -> list[float]:
    """`R +` all rewards of calls `+` its agent's rewards.
    Identical assignment (2508.03680 §3.3): every call gets the episode's return.

    Rewards of calls count towards the return. Rewards of an agent count for that agent's calls only.
    """
    returns = {agent: episode_return(episode, agent) for agent in {t.agent for t in episode.transitions}}
    return [returns[t.agent] for t in episode.transitions]


@reward_rule("last-call", group=("task", "agent", "turns-left"), depends_on=rewards_of)
def last_call(episode: Episode) -> list[float]:
    """`r_t`.
    The last trained call gets the episode's reward, every other call only its own rewards.
    """
    return immediate(episode)


@reward_rule("explicit", group=("task", "agent", "turn"), depends_on=rewards_of)
def explicit(episode: Episode) -> list[float]:
    """Its own rewards `+` its agent's rewards.
    The episode's reward `R` is reported, but not trained on.
    """
    own = _by_agent(episode)
    by_call = _by_call(episode)
    return [by_call.get(t.call, 0.0) + own.get(t.agent, 0.0) for t in episode.transitions]


@reward_rule("discounted", group=("task", "agent", "turn"), depends_on=rewards_of)
def discounted(episode: Episode, *, gamma: Gamma) -> list[float]:
    """`Σ_{k≥t} γ^(k−t) r_k`: the discounted reward-to-go."""
    values: list[float] = []
    following = 0.0
    for reward in reversed(immediate(episode)):
        following = reward + gamma * following
        values.append(following)
    return values[::-1]


@reward_rule("gigpo", depends_on=rewards_of)
def gigpo(
    episode: Episode, *, gamma: Gamma, step_weight: Annotated[float, Ge(0)] = 1.0, anchor: str = "exact"
) -> list[Component]:
    """`broadcast`, plus `step_weight` times the advantage of `discounted` per anchor.
    The second advantage is computed among calls with the same anchor (GiGPO, 2505.10978). In the paper it also
    compares rollouts with equal rewards; here these get no advantage.

    ``anchor``: the group key that defines equal anchors. ``exact`` is short for ``anchor``, ``normalised`` for ``anchor-normalised``.
    """
    values, keys = discounted(episode, gamma=gamma), (_anchor_key(anchor),)
    steps = Component(values=values, weight=step_weight, group_by=keys, name="step")
    return [Component(values=broadcast(episode)), steps]


def immediate(episode: Episode) -> list[float]:
    """r_t: the immediate reward of each trained call.

    A call's rewards count at that call, an agent's at the agent's last call, the episode's at the last call. Rewards of an untrained
    call count at the last trained call before it, or else at the first one. Rewards of an agent without trained calls are ignored.
    """
    return [0.0 if reward is None else reward for reward in placed_rewards(episode)]


def placed_rewards(episode: Episode) -> list[float | None]:
    """Like `immediate`, with None for calls at which no reward counts, even one of 0."""
    calls = episode.transitions
    index = {t.call: i for i, t in enumerate(calls)}
    order = {call.id: call.sequence for call in episode.trace.calls}
    rewards: list[float | None] = [None] * len(calls)
    for r in episode.rewards if calls else ():
        if r.call is None:
            own = [i for i, t in enumerate(calls) if r.agent in (None, t.agent)]
            if not own:
                continue
            at = own[-1]
        elif r.call in index:
            at = index[r.call]
        else:
            at = max((i for i, t in enumerate(calls) if t.sequence <= order.get(r.call, 0)), default=0)
        rewards[at] = (rewards[at] or 0.0) + r.value
    return rewards


def _anchor_key(anchor: str) -> str:
    return {"exact": "anchor", "normalised": "anchor-normalised"}.get(anchor, anchor)


def _by_agent(episode: Episode) -> dict[str, float]:
    sums: dict[str, float] = {}
    for r in episode.rewards:
        if r.agent is not None and r.call is None:
            sums[r.agent] = sums.get(r.agent, 0.0) + r.value
    return sums


def _by_call(episode: Episode) -> dict[str, float]:
    sums: dict[str, float] = {}
    for r in episode.rewards:
        if r.call is not None:
            sums[r.call] = sums.get(r.call, 0.0) + r.value
    return sums
