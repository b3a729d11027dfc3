"""What credit looks at: one rollout with the calls to be trained, and the values that rules give them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_core.trace import Call, Reward, Trace, check_reward
from lightning_core.transitions import Transition


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One rollout as credit sees it: all that happened, the calls to be trained in order, and what was rewarded."""

    trace: Trace
    transitions: Sequence[Transition]
    rewards: Sequence[Reward]
    """Those of the trace, and what was derived from it since (automatic intermediate rewards, a judge's scores)."""

    @property
    def rollout(self) -> str:
        return self.trace.rollout

    @property
    def task_id(self) -> str:
        return self.trace.task_id

    @property
    def reward(self) -> float:
        """The episode's own return: the sum of its episode rewards."""
        return math.fsum(check_reward(r.value) for r in self.rewards if r.is_episode)

    @cached_property
    def turns(self) -> list[int]:
        """For each transition how many calls its agent has made before it in this rollout."""
        so_far: Counter[str] = Counter()
        found: list[int] = []
        for t in self.transitions:
            found.append(so_far[t.agent])
            so_far[t.agent] += 1
        return found

    @cached_property
    def turns_left(self) -> list[int]:
        """For each transition the number of later calls of its agent in this rollout."""
        total = Counter(t.agent for t in self.transitions)
        return [total[t.agent] - 1 - turn for t, turn in zip(self.transitions, self.turns, strict=True)]

    @cached_property
    def outcome(self) -> Hashable:
        """All rewards: the return, those of agents with a transition, and those of calls by agent and turn.

        None if a call was rewarded that is no transition.
        """
        places = {t.call: (t.agent, turn) for t, turn in zip(self.transitions, self.turns, strict=True)}
        agents = {t.agent for t in self.transitions}
        sums: dict[Hashable, float] = {}
        for r in self.rewards:
            if r.call is not None and r.value and r.call not in places:
                return None
            place = r.agent if r.call is None else places.get(r.call)
            if r.call is not None or r.agent in agents:
                sums[place] = sums.get(place, 0.0) + r.value
        return round(self.reward, 9), frozenset((place, round(v, 9)) for place, v in sums.items() if round(v, 9))

    @cached_property
    def observations(self) -> list[str]:
        """For each transition what was new to its agent, as JSON: the messages after the last response in its prompt."""
        calls = {call.id: call for call in self.trace.calls}
        return [json.dumps(_news(calls[t.call]), sort_keys=True) for t in self.transitions]


def _news(call: Call) -> list[Mapping[str, Any]]:
    said = [i for i, message in enumerate(call.messages) if message.get("role") == "assistant"]
    return [{k: m.get(k) for k in ("role", "content")} for m in call.messages[said[-1] + 1 if said else 0 :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Values of an episode's transitions that are compared with those of the same part of other episodes.

    A reward rule may return several: the advantages of all parts are added up.
    """

    values: Sequence[float]
    weight: float = 1.0
    """The factor of the part's advantages."""
    group_by: tuple[str, ...] = ()
    """Group keys besides those of the rule."""
    name: str = ""
    """The prefix of the part's metrics."""
    targets: Sequence[float] | None = None
    """The values that the critic should have predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What one call is worth, before any baseline."""

    call: str
    rollout: str
    value: float
    weight: float
    """1 / number of calls that this rollout has in the group."""
