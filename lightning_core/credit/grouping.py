"""Group keys: calls are compared if they agree in all keys of ``group_by``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from lightning_core.credit.checked_rules import keys_of
from lightning_core.credit.episode import Episode, Value, reward_magnitude
from lightning_core.credit.precision import agree
from lightning_core.credit.registry import GROUP_KEYS, group_key

_NUMBER = re.compile(r"[-_ .#]*\d+$")
_SPACE = re.compile(r"(?:\s|\\[nrt])+")


@group_key("task")
def task(episode: Episode) -> list[str]:
    """The task."""
    return [episode.task_id] * len(episode.transitions)


@group_key("agent")
def agent(episode: Episode) -> list[str]:
    """The agent that made the call."""
    return [t.agent for t in episode.transitions]


@group_key("agent-family")
def agent_family(episode: Episode) -> list[str]:
    """The agent's name without a number at its end: `researcher-3` and `researcher-7` share `researcher`.
    For agents that are created at run time.
    """
    return [_NUMBER.sub("", t.agent) or t.agent for t in episode.transitions]


@group_key("policy")
def policy(episode: Episode) -> list[str]:
    """The policy that answered the call."""
    return [t.policy for t in episode.transitions]


@group_key("turn")
def turn(episode: Episode) -> list[str]:
    """The number of earlier calls of the agent in the rollout."""
    return [str(number) for number in episode.turns]


@group_key("turns-left")
def turns_left(episode: Episode) -> list[str]:
    """The number of later calls of the agent in the rollout."""
    return [str(number) for number in episode.turns_left]


@group_key("anchor")
def anchor(episode: Episode) -> list[str]:
    """The agent and its new messages: those after its last response.
    GiGPO's anchor states (2505.10978).
    """
    return [f"{t.agent}\0{o}" for t, o in zip(episode.transitions, episode.observations, strict=True)]


@group_key("anchor-normalised")
def anchor_normalised(episode: Episode) -> list[str]:
    """Like `anchor`, ignoring case and white space."""
    return [f"{t.agent}\0{_normal(o)}" for t, o in zip(episode.transitions, episode.observations, strict=True)]


def group_values(
    episodes: Sequence[Episode], values: Mapping[str, float], group_by: Sequence[str | Callable[..., Sequence[str]]]
) -> list[list[Value]]:
    """The groups of the calls that have ``values``, in order of first appearance; without keys, one group.

    In each group the weights of a rollout's calls sum to 1.
    """
    keys = [GROUP_KEYS.find(key) for key in group_by]
    members: dict[tuple[str, ...], dict[str, list[str]]] = {}
    magnitudes: dict[str, float] = {}
    for episode in episodes:
        parts = [keys_of(episode, key) for key in keys]
        by_agent = {agent: reward_magnitude(episode, agent) for agent in {t.agent for t in episode.transitions}}
        magnitudes |= {t.call: by_agent[t.agent] for t in episode.transitions}
        for index, t in enumerate(episode.transitions):
            if t.call not in values:
                continue
            key = tuple(part[index] for part in parts)
            members.setdefault(key, {}).setdefault(episode.rollout, []).append(t.call)
    return [
        [
            Value(call=call, rollout=rollout, value=values[call], weight=1 / len(calls), magnitude=magnitudes[call])
            for rollout, calls in by_rollout.items()
            for call in calls
        ]
        for by_rollout in members.values()
    ]


def equalise(groups: Sequence[Sequence[Value]], outcomes: Mapping[str, Hashable]) -> list[list[Value]]:
    """``groups``, with equal values in groups whose rollouts have the same outcome.

    An outcome of None equals no other. The values are replaced by their mean, in which each rollout counts once.
    """
    found: list[list[Value]] = []
    for group in groups:
        first, *others = dict.fromkeys(outcomes.get(v.rollout) for v in group)
        same = first is not None and all(agree(first, other) for other in others)
        found.append(_as_equal(group) if same else list(group))
    return found


def _as_equal(group: Sequence[Value]) -> list[Value]:
    mean = math.fsum(v.weight * v.value for v in group) / math.fsum(v.weight for v in group)
    return [replace(v, value=mean) for v in group]


def _normal(observation: str) -> str:
    """``observation`` in lower case, with white space collapsed."""
    return _SPACE.sub(" ", observation).casefold()
