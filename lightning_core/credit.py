"""Credit: from the rewards of an episode to one advantage for each call. Pure functions, two registries.

1. A *reward rule* gives every call of an episode a value (episode → call).
2. An *advantage rule* compares the values within a group, and perhaps over the batch, and yields advantages.

Every token of a call has the call's advantage (call → token; arXiv 2508.03680, §3.3). Whatever the number of calls or rows of a
rollout, **each rollout counts once** in means and deviations: its n calls weigh 1/n each (arXiv 2608.17528: averaging over rows
instead is biased: rewards 1 with three rows and 0 with one have the mean 1/2, not 3/4). Advantages are computed before anything is
dropped. Groups of one rollout and groups of equal values get 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightning_core.errors import CreditError
from lightning_core.trace import Reward, check_reward
from lightning_core.transitions import Transition

T = TypeVar("T")

EPSILON = 1e-6
"""Added to standard deviations, as in GRPO (arXiv 2402.03300) implementations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One rollout as credit sees it: the calls to be trained, in order, and what was rewarded."""

    rollout: str
    task_id: str
    transitions: Sequence[Transition]
    rewards: Sequence[Reward]

    @property
    def reward(self) -> float:
        """The episode's own return: the sum of its episode rewards."""
        return math.fsum(check_reward(r.value) for r in self.rewards if r.is_episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What one call is worth, before any baseline."""

    call: str
    rollout: str
    value: float
    weight: float
    """1 / number of calls that this rollout has in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The result: by call id, and how the groups looked."""

    values: Mapping[str, float]
    advantages: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


RewardRule = Callable[[Episode, float], list[float]]
AdvantageRule = Callable[[list[list[Value]]], dict[str, float]]


def broadcast(episode: Episode, gamma: float) -> list[float]:
    """Identical assignment (arXiv 2508.03680, §3.3): every call gets the episode's whole return.

    Rewards bound to a call count towards the return; rewards bound to an agent count for that agent's calls only.
    """
    del gamma
    total = episode.reward + math.fsum(r.value for r in episode.rewards if r.call is not None)
    own = _by_agent(episode)
    return [total + own.get(t.agent, 0.0) for t in episode.transitions]


def discounted(episode: Episode, gamma: float) -> list[float]:
    """Reward-to-go: value_t = Σ_{k≥t} γ^(k−t) · r_k over the episode's trained calls.

    A call's own rewards stand at that call, an agent's at the agent's last call, the episode's at the last call of all.
    """
    calls = episode.transitions
    immediate = {t.call: 0.0 for t in calls}
    for r in episode.rewards:
        if r.call is not None:
            target = r.call
        else:
            target = next((t.call for t in reversed(calls) if r.agent in (None, t.agent)), None)
        if target in immediate:
            immediate[target] += r.value
    values: list[float] = []
    following = 0.0
    for t in reversed(calls):
        following = immediate[t.call] + gamma * following
        values.append(following)
    return values[::-1]


def _by_agent(episode: Episode) -> dict[str, float]:
    sums: dict[str, float] = {}
    for r in episode.rewards:
        if r.agent is not None and r.call is None:
            sums[r.agent] = sums.get(r.agent, 0.0) + r.value
    return sums


def grpo(groups: list[list[Value]]) -> dict[str, float]:
    """A = (v − μ) / (σ + ε) within each group (arXiv 2402.03300), σ with Bessel's correction over rollouts."""
    advantages: dict[str, float] = {}
    for group in groups:
        mean, deviation = _moments(group)
        for v in group:
            advantages[v.call] = 0.0 if _is_flat(group) else (v.value - mean) / (deviation + EPSILON)
    return advantages


def rloo(groups: list[list[Value]]) -> dict[str, float]:
    """A = v − mean of the *other* rollouts of the group (arXiv 2402.14740)."""
    advantages: dict[str, float] = {}
    for group in groups:
        n = _rollouts(group)
        own: dict[str, float] = {}
        for v in group:
            own[v.rollout] = own.get(v.rollout, 0.0) + v.weight * v.value
        total = math.fsum(own.values())
        for v in group:
            advantages[v.call] = 0.0 if _is_flat(group) else v.value - (total - own[v.rollout]) / (n - 1)
    return advantages


def reinforce_plus_plus_baseline(groups: list[list[Value]]) -> dict[str, float]:
    """v − μ of the group, then whitened over the whole batch (REINFORCE++-baseline, arXiv 2501.03262)."""
    centred: list[Value] = []
    for group in groups:
        mean, _ = _moments(group)
        for v in group:
            value = 0.0 if _is_flat(group) else v.value - mean
            centred.append(Value(call=v.call, rollout=v.rollout, value=value, weight=v.weight))
    if _is_flat(centred):
        return {v.call: 0.0 for v in centred}
    mean, deviation = _moments(centred)
    flat = {v.call for group in groups if _is_flat(group) for v in group}
    return {v.call: 0.0 if v.call in flat else (v.value - mean) / (deviation + EPSILON) for v in centred}


REWARD_RULES: dict[str, RewardRule] = {"broadcast": broadcast, "discounted": discounted}
ADVANTAGE_RULES: dict[str, AdvantageRule] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
}


def assign_credit(
    episodes: Sequence[Episode],
    *,
    rewards: str = "broadcast",
    gamma: float = 1.0,
    advantage: str = "grpo",
    group_by: Sequence[str] = ("task",),
) -> Credit:
    """Give every call of ``episodes`` a value and an advantage.

    ``group_by`` is a subset of {"task", "agent"}: calls that agree in these form a group. Raises `CreditError` for an unknown
    rule or key, naming the known ones.
    """
    reward_rule = _lookup(REWARD_RULES, rewards, "reward rule")
    advantage_rule = _lookup(ADVANTAGE_RULES, advantage, "advantage rule")
    unknown = set(group_by) - {"task", "agent"}
    if unknown or not group_by:
        raise CreditError(f"group_by has {sorted(group_by)!r}; expected one or more of 'task', 'agent'")

    values: dict[str, float] = {}
    members: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for episode in episodes:
        for t, value in zip(episode.transitions, reward_rule(episode, gamma), strict=True):
            values[t.call] = value
            key = tuple(episode.task_id if k == "task" else t.agent for k in group_by)
            members.setdefault(key, {}).setdefault(episode.rollout, []).append(t.call)
    groups = [
        [
            Value(call=call, rollout=rollout, value=values[call], weight=1 / len(calls))
            for rollout, calls in by_rollout.items()
            for call in calls
        ]
        for by_rollout in members.values()
    ]
    single = sum(_rollouts(g) == 1 for g in groups)
    return Credit(
        values=values,
        advantages=advantage_rule(groups),
        metrics={
            "groups": float(len(groups)),
            "groups_single": float(single),
            "groups_equal": float(sum(_is_flat(g) for g in groups) - single),
        },
    )


def _lookup(registry: Mapping[str, T], name: str, what: str) -> T:
    if name not in registry:
        raise CreditError(f"unknown {what} {name!r}; known are {sorted(registry)!r}")
    return registry[name]


def _rollouts(group: Sequence[Value]) -> int:
    return len({v.rollout for v in group})


def _is_flat(group: Sequence[Value]) -> bool:
    """Nothing to compare: one rollout, or the same value everywhere."""
    return _rollouts(group) < 2 or min(v.value for v in group) == max(v.value for v in group)


def _moments(group: Sequence[Value]) -> tuple[float, float]:
    """Mean and standard deviation (Bessel-corrected over rollouts) with each rollout counting once."""
    n = _rollouts(group)
    mean = math.fsum(v.weight * v.value for v in group) / n
    square = math.fsum(v.weight * (v.value - mean) ** 2 for v in group)
    return mean, math.sqrt(square / (n - 1)) if n > 1 else 0.0
