"""An agent of a suite, and its tasks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Task = dict[str, Any]
"""A task: its ``text``, which is unique, and what the score needs."""

TRAIN, HELD_OUT = 400, 80
_HELD_OUT_FACTS = 0.3
_CANDIDATES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent of a suite."""

    name: str
    kind: str
    solve: Callable[[Task], Any]
    """The agent entry; it returns its answer as a string."""
    score: Callable[[Task, Any], float]
    """The reward function: 0 to 1."""
    draw: Callable[[random.Random], Task]
    """A random task."""
    ideal: Callable[[Task], Sequence[str]]
    """The responses of all model calls of a rollout with the full reward."""
    train: tuple[str, ...]
    """Names of the trained agents."""
    frozen: tuple[str, ...] = ()
    """Names of agents that are answered by the untrained model."""
    solved: float = 1.0
    """The reward from which a rollout counts as solved."""
    is_answer: bool = True
    """Whether the last response is the answer, so that one answer to all tasks has a reward."""
    fact: Callable[[Task], object] | None = None
    """What a task is about, if tasks with different texts have it in common: no fact of a held-out task is in a training task."""


def split(agent: Agent, *, train: int = TRAIN, held_out: int = HELD_OUT) -> tuple[list[Task], list[Task]]:
    """Training tasks and held-out tasks, without a common text or fact. More training tasks keep the held-out ones."""
    rng = random.Random(agent.name)
    seen: set[str] = set()
    tasks: dict[bool, list[Task]] = {False: [], True: []}
    wanted = {False: train, True: held_out}
    for _ in range(20 * (train + held_out)):
        task = agent.draw(rng)
        held = len(tasks[True]) < held_out if agent.fact is None else _is_held_out(agent, agent.fact(task))
        if task["text"] in seen or len(tasks[held]) == wanted[held]:
            continue
        seen.add(task["text"])
        tasks[held].append({**task, "id": str(len(seen))})
        if all(len(tasks[held]) == wanted[held] for held in wanted):
            break
    return tasks[False], tasks[True]


def _is_held_out(agent: Agent, fact: object) -> bool:
    return random.Random(f"{agent.name} {fact}").random() < _HELD_OUT_FACTS


def constant_reward(agent: Agent) -> float | None:
    """The held-out reward of the best of the most frequent ideal answers, given to all tasks; None if answers have no reward."""
    if not agent.is_answer:
        return None
    tasks, held_out = split(agent)
    answers = Counter(agent.ideal(task)[-1] for task in tasks).most_common(_CANDIDATES)
    return max(fmean(agent.score(task, answer) for task in held_out) for answer, _ in answers)
