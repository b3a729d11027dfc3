"""The data of credit assignment: episodes, components and values."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from lightning_core.credit.precision import are_close, sum_of
from lightning_core.trace import Call, Reward, Trace, check_reward
from lightning_core.transitions import Transition


class StepFact(Protocol):
    """A fact about the rollouts of a step."""

    def keep_rewards(self, kept: Callable[[Reward], bool]) -> StepFact:
        """The same fact with those rewards that are ``kept``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One rollout: its trace, its trained calls in order, and its rewards."""

    trace: Trace
    transitions: Sequence[Transition]
    rewards: Sequence[Reward]
    """The trace's rewards, then those that signals add."""
    masked: bool = False
    """Whether its calls are compared with others, but not trained on."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Additions of signals for rules: facts of the whole step (`facts.step_fact`), and a critic's values by call id as ``critic``."""

    @property
    def rollout(self) -> str:
        return self.trace.rollout

    @property
    def task_id(self) -> str:
        return self.trace.task_id

    @property
    def reward(self) -> float:
        """The sum of the episode rewards."""
        return math.fsum(check_reward(r.value) for r in self.rewards if r.is_episode)

    @cached_property
    def repeated(self) -> list[Call]:
        """The calls of trained agents that a fork repeats: no transitions, since they were sampled in another rollout."""
        return [call for call in self.trace.calls if call.replays is not None and call.trained]

    @property
    def turns(self) -> list[int]:
        """The number of earlier calls of each transition's agent in this rollout, including repeated calls."""
        return [self._places[t.call][1] for t in self.transitions]

    @property
    def turns_left(self) -> list[int]:
        """The number of later calls of each transition's agent in this rollout, including repeated calls."""
        total = Counter(agent for agent, _ in self._places.values())
        return [total[t.agent] - 1 - turn for t, turn in zip(self.transitions, self.turns, strict=True)]

    @cached_property
    def _places(self) -> dict[str, tuple[str, int]]:
        """Agent and turn of each transition and each repeated call, by call id."""
        calls = [(t.sequence, t.agent, t.call) for t in self.transitions]
        calls += [(call.sequence, call.agent or "", call.id) for call in self.repeated]
        so_far: Counter[str] = Counter()
        places: dict[str, tuple[str, int]] = {}
        for _, agent, call in sorted(calls, key=lambda found: found[0]):
            places[call] = (agent, so_far[agent])
            so_far[agent] += 1
        return places

    @cached_property
    def outcome(self) -> Hashable:
        """All rewards by place: episode, agent with a transition, or agent and turn of a call.

        None if a rewarded call is neither a transition nor repeated. Two of them are compared with `precision.agree`.
        """
        places = self._places
        agents = {t.agent for t in self.transitions}
        found: dict[str | tuple[str, int] | None, list[float]] = {}
        for r in self.rewards:
            if r.call is not None and r.value and r.call not in places:
                return None
            place = r.agent if r.call is None else places.get(r.call)
            if r.call is not None or r.agent in agents:
                found.setdefault(place, []).append(r.value)
        sums = {repr(place): sum_of(values) for place, values in found.items()}
        others = {place: own for place, own in sums.items() if not are_close((own.value, 0.0), magnitude=own.size)}
        return sum_of(r.value for r in self.rewards if r.is_episode), tuple(sorted(others.items()))

    @cached_property
    def observations(self) -> list[str]:
        """The new messages of each transition's prompt as JSON.

        New messages follow the last response in the prompt.
        """
        calls = {call.id: call for call in self.trace.calls}
        return [json.dumps(_new_messages(calls[t.call]), sort_keys=True) for t in self.transitions]


def episode_return(episode: Episode, agent: str) -> float:
    """The return of ``episode`` for ``agent``: `R +` all rewards of calls `+` rewards of the agent."""
    return math.fsum([episode.reward, *(r.value for r in episode.rewards if r.call is not None or r.agent == agent)])


def reward_magnitude(episode: Episode, agent: str) -> float:
    """The sum of the sizes of all rewards that count for ``agent``, those of calls included."""
    return math.fsum(abs(r.value) for r in episode.rewards if r.call is not None or r.agent in (None, agent))


def _new_messages(call: Call) -> list[Mapping[str, Any]]:
    responses = [i for i, message in enumerate(call.messages) if message.get("role") == "assistant"]
    start = responses[-1] + 1 if responses else 0
    return [{k: m.get(k) for k in ("role", "content")} for m in call.messages[start:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """The sums `Σ_{k≥t} γ^(k−t) A_k` of the advantages of a rollout's calls, for each call t."""

    gamma: float
    rescale: bool = False
    """Whether to divide by `√n`, with n the number of compared calls from t on: the variance of n independent terms is n times that
    of one."""

    def __call__(self, advantages: Sequence[float | None]) -> list[float]:
        """The sums. ``advantages``: of each call in order; None for a call that was not compared."""
        found: list[float] = []
        total, terms = 0.0, 0
        for advantage in reversed(advantages):
            total *= self.gamma
            if advantage is not None:
                total, terms = total + advantage, terms + 1
            found.append(total / math.sqrt(terms) if self.rescale and terms else total)
        return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Values of an episode's transitions, one component of the reward rule's result.

    Values are compared within the same component of other episodes. The advantages of all components are added.
    """

    values: Sequence[float | None]
    """One for each transition; None for a call that is not compared."""
    weight: float = 1.0
    """Coefficient of the component's advantages."""
    share: float | None = None
    """If set, components are levels of a weighted mean: a call's coefficient is ``weight · share / Σ share`` over the levels
    that compare the call, where its group is not flat or the advantage rule decides about flat groups."""
    group_by: Sequence[str | Callable[[Episode], Sequence[str]]] = ()
    """Group keys in addition to the rule's. Functions must be equal in all episodes."""
    name: str = ""
    """Prefix of the component's metrics."""
    accumulate: Accumulate | None = None
    """Sums the advantages over later calls, after they were compared. Not with a share."""
    targets: Sequence[float] | None = None
    """Regression targets of the critic's values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The value of one call, before any baseline."""

    call: str
    rollout: str
    value: float
    weight: float
    """1 / number of the rollout's calls in the group."""
    magnitude: float = 0.0
    """Sum of the sizes of the rewards that the value may be computed from; its rounding error is relative to this."""
