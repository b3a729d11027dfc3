"""Reward rules: episode → call. Each gives every trained call of an episode a value. Pure functions that fit a screen."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_core.credit.branches import parallel_branches
from lightning_core.credit.episode import Episode

RewardRule = Callable[[Episode, float], list[float]]
"""``rule(episode, gamma)``: one value for each of the episode's transitions."""


def broadcast(episode: Episode, gamma: float) -> list[float]:
    """Identical assignment (arXiv 2508.03680, §3.3): every call gets the episode's whole return.

    Rewards bound to a call count towards the return; rewards bound to an agent count for that agent's calls only.
    """
    del gamma
    total = episode.reward + math.fsum(r.value for r in episode.rewards if r.call is not None)
    own = _by_agent(episode)
    return [total + own.get(t.agent, 0.0) for t in episode.transitions]


def last_call(episode: Episode, gamma: float) -> list[float]:
    """The episode's return stands at its last trained call alone; every other call has what was given to itself."""
    del gamma
    return immediate(episode)


def explicit(episode: Episode, gamma: float) -> list[float]:
    """What was given to the call itself, and to its agent; the episode's own reward is for the eye alone."""
    del gamma
    own = _by_agent(episode)
    by_call = _by_call(episode)
    return [by_call.get(t.call, 0.0) + own.get(t.agent, 0.0) for t in episode.transitions]


def discounted(episode: Episode, gamma: float) -> list[float]:
    """Reward-to-go: value_t = Σ_{k≥t} γ^(k−t) · r_k over the episode's trained calls, with r as in `immediate`."""
    values: list[float] = []
    following = 0.0
    for reward in reversed(immediate(episode)):
        following = reward + gamma * following
        values.append(following)
    return values[::-1]


def leave_one_branch_out(episode: Episode, gamma: float) -> list[float]:
    """`broadcast`, and a call in a parallel branch gets what its branch was given less the mean of the branches beside it.

    Branches that ran at the same time in the same agents are each other's baseline, as attempts are in RLOO (arXiv 2402.14740). Over
    the branches of a section the differences sum to 0, so the rollout's mean is that of `broadcast`.
    """
    values = broadcast(episode, gamma)
    by_call = _by_call(episode)
    for section in parallel_branches(episode):
        own = [math.fsum(by_call.get(call, 0.0) for call in branch.calls) for branch in section]
        for mine, branch in zip(own, section, strict=True):
            others = (math.fsum(own) - mine) / (len(section) - 1)
            for index, t in enumerate(episode.transitions):
                if t.call in branch.calls:
                    values[index] += mine - others
    return values


def immediate(episode: Episode) -> list[float]:
    """r_t: a call's own rewards stand at that call, an agent's at the agent's last call, the episode's at the last call of all.

    What was given to a call that is not trained stands at the last trained call before it, or else at the first.
    """
    calls = episode.transitions
    index = {t.call: i for i, t in enumerate(calls)}
    order = {call.id: call.sequence for call in episode.trace.calls}
    rewards = [0.0] * len(calls)
    for r in episode.rewards if calls else ():
        if r.call is None:
            at = max((i for i, t in enumerate(calls) if r.agent in (None, t.agent)), default=len(calls) - 1)
        elif r.call in index:
            at = index[r.call]
        else:
            at = max((i for i, t in enumerate(calls) if t.sequence <= order.get(r.call, 0)), default=0)
        rewards[at] += r.value
    return rewards


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


REWARD_RULES: dict[str, RewardRule] = {
    "broadcast": broadcast,
    "last-call": last_call,
    "explicit": explicit,
    "discounted": discounted,
    "leave-one-branch-out": leave_one_branch_out,
}
