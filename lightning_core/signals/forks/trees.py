"""The rollouts of a step as trees: a fork shares the calls that it repeats with the rollout that it was forked from.

A *choice* is a response. The responses that were sampled with the same history are choices of the same *decision*, which
has the id of the first. All rollouts through a choice are samples of what the policy earns after it, and all rollouts
through a decision are samples of what it earns before it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_core.credit.episode import Episode, episode_return
from lightning_core.credit.precision import agree
from lightning_core.trace import Call, Reward
from lightning_core.transitions import Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One rollout: its choices and the decisions they belong to, in order of its calls."""

    episode: Episode
    choices: Sequence[str]
    decisions: Sequence[str]


class Trees:
    """The trees of the rollouts of a step."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        sampled = (call for e in episodes for call in e.trace.calls if call.replays is None)
        # A fork of a fork repeats responses that are choices of a decision of an earlier rollout.
        decisions = {call.id: call.forks or call.id for call in sampled}
        self._paths = {e.rollout: _path(e, decisions) for e in episodes}
        self._forked = {call.forks for e in episodes for call in e.trace.calls if call.forks is not None}
        self._through: dict[str, list[Path]] = defaultdict(list)
        self._at: dict[str, list[Path]] = defaultdict(list)
        self._owner: dict[str, str] = {}
        for path in self._paths.values():
            for call in path.episode.trace.calls:
                if call.replays is None:
                    self._owner[call.id] = path.episode.rollout
            for choice, decision in zip(path.choices, path.decisions, strict=True):
                self._through[choice].append(path)
                self._at[decision].append(path)
        self._roots = {rollout: self._root(path) for rollout, path in self._paths.items()}
        self._trees: dict[str, list[Path]] = defaultdict(list)
        self._of_task: dict[str, set[str]] = defaultdict(set)
        for rollout, root in self._roots.items():
            self._trees[root].append(self._paths[rollout])
            self._of_task[self._paths[rollout].episode.task_id].add(root)

    def keep_rewards(self, kept: Callable[[Reward], bool]) -> Trees:
        """The same trees with those rewards that are ``kept``."""
        episodes = (path.episode for path in self._paths.values())
        return Trees([replace(e, rewards=[r for r in e.rewards if kept(r)]) for e in episodes])

    def value(self, transition: Transition) -> float:
        """The mean return of the rollouts through the response of ``transition``."""
        return _mean(self._through[transition.call], transition.agent)

    def last_decision(self, transition: Transition) -> str | None:
        """The last decision with several choices that the call depends on, or is a choice of; None if there is none."""
        call, several = self._several(transition)
        return next((d for d, c in reversed(several) if c.id == call.id or c.end_ns <= call.start_ns), None)

    def next_decision(self, transition: Transition) -> str | None:
        """The first decision with several choices that began after the call; None if there is none."""
        call, several = self._several(transition)
        return next((d for d, c in several if c.start_ns >= call.end_ns), None)

    def value_before(self, decision: str, agent: str) -> float:
        """The mean return of the rollouts through ``decision``, for ``agent``."""
        return _mean(self._at[decision], agent)

    def others(self, transition: Transition) -> float | None:
        """The mean return of the rollouts that chose otherwise at `last_decision`; None if there are none.

        Without such a decision: of the other trees of the task, each of which counts once.
        """
        path, agent = self._paths[transition.rollout], transition.agent
        decision = self.last_decision(transition)
        if decision is not None:
            own = path.choices[path.decisions.index(decision)]
            rest = [p for p in self._at[decision] if own not in p.choices]
            return _mean(rest, agent) if rest else None
        others = self._of_task[path.episode.task_id] - {self._roots[transition.rollout]}
        means = [_mean(self._trees[root], agent) for root in sorted(others)]
        return math.fsum(means) / len(means) if means else None

    def outcome(self, episode: Episode) -> Hashable:
        """`Episode.outcome` if all rollouts of its tree have the same, else None."""
        tree = self._trees[self.root(episode)]
        return episode.outcome if all(agree(p.episode.outcome, episode.outcome) for p in tree) else None

    def root(self, episode: Episode) -> str:
        """The rollout that the tree of ``episode`` grew from."""
        return self._roots[episode.rollout]

    def _root(self, path: Path) -> str:
        forked = next((call.forks for call in path.episode.trace.calls if call.forks is not None), None)
        owner = None if forked is None else self._owner.get(forked)
        return path.episode.rollout if owner is None else self._root(self._paths[owner])

    def _several(self, transition: Transition) -> tuple[Call, list[tuple[str, Call]]]:
        """The call of ``transition``, and the decisions of its rollout that have several choices, each with the rollout's call."""
        path = self._paths[transition.rollout]
        calls = path.episode.trace.calls
        own = next(call for call in calls if call.id == transition.call)
        return own, [(d, c) for d, c in zip(path.decisions, calls, strict=True) if d in self._forked]


def _path(episode: Episode, decisions: Mapping[str, str]) -> Path:
    """The path of ``episode``. ``decisions``: of each choice of the step, its decision."""
    choices = [_choice(call) for call in episode.trace.calls]
    return Path(episode=episode, choices=choices, decisions=[decisions.get(choice, choice) for choice in choices])


def _choice(call: Call) -> str:
    return call.replays or call.id


def _mean(paths: Sequence[Path], agent: str) -> float:
    return math.fsum(episode_return(p.episode, agent) for p in paths) / len(paths)
