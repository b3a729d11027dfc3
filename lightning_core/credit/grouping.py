"""Which calls are compared with one another: those that agree in a subset of {task, agent, turn, anchor, policy}."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from lightning_core.credit.episode import Episode, Value

_SPACE = re.compile(r"(?:\s|\\[nrt])+")

GROUP_KEYS: dict[str, Callable[[Episode], Sequence[str]]] = {
    "task": lambda e: [e.task_id] * len(e.transitions),
    "agent": lambda e: [t.agent for t in e.transitions],
    "policy": lambda e: [t.policy for t in e.transitions],
    "turn": lambda e: [str(turn) for turn in e.turns],
    # Two calls in the same place: the same agent was shown the same news (GiGPO's anchor states, arXiv 2505.10978).
    "anchor": lambda e: [f"{t.agent}\0{o}" for t, o in zip(e.transitions, e.observations, strict=True)],
    "anchor-normalised": lambda e: [
        f"{t.agent}\0{_normal(o)}" for t, o in zip(e.transitions, e.observations, strict=True)
    ],
}
"""For each transition of an episode the part of its key."""


def group_values(
    episodes: Sequence[Episode], values: Mapping[str, float], group_by: Sequence[str]
) -> list[list[Value]]:
    """The groups in order of first appearance. In each, a rollout's calls weigh 1 together."""
    members: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for episode in episodes:
        parts = [GROUP_KEYS[key](episode) for key in group_by]
        for t, key in zip(episode.transitions, zip(*parts, strict=True), strict=True):
            members.setdefault(key, {}).setdefault(episode.rollout, []).append(t.call)
    return [
        [
            Value(call=call, rollout=rollout, value=values[call], weight=1 / len(calls))
            for rollout, calls in by_rollout.items()
            for call in calls
        ]
        for by_rollout in members.values()
    ]


def _normal(observation: str) -> str:
    """Without regard to case and white space."""
    return _SPACE.sub(" ", observation).casefold()
