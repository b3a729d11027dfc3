"""The classes of an agent's tasks, for agents that decide between a few: one constant decision solves a class and no other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tests.bench.defaults.results import Row
from tests.bench.defaults.suite.agent import split
from tests.bench.defaults.suites import agents_of

CLASSES: Mapping[str, str] = {
    "route": "queue",
    "ticket": "queue",
    "handoff": "desk",
    "pick": "place",
    "reviews": "label",
    "priority": "priority",
}
"""The field of a task that holds its class, by agent."""


def solved_classes(row: Row) -> dict[str, bool]:
    """Whether a held-out task of each class is solved after training; empty for agents without classes."""
    if (field := CLASSES.get(row.agent)) is None:
        return {}
    _, held_out = split(agents_of(row.suite)[row.agent])
    found: dict[str, list[float]] = defaultdict(list)
    for task, reward in zip(held_out, row.after, strict=True):
        if reward is not None:
            found[str(task[field])].append(reward)
    return {name: any(map(row.is_solved, found[name])) for name in sorted(found)}
