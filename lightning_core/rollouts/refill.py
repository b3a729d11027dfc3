"""Dynamic sampling (DAPO, arXiv 2503.14476): which groups to replace, and by which tasks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from lightning_core.credit import Credit, Episode
from lightning_core.rollouts.attempt import Task


def without_gradient(episodes: Sequence[Episode], credit: Credit) -> list[str]:
    """The ids of the tasks whose advantages are all 0."""
    has_gradient: dict[str, bool] = {}
    for e in episodes:
        has_gradient[e.task_id] = has_gradient.get(e.task_id, False) or any(
            credit.advantages[t.call] for t in e.transitions
        )
    return [task for task, has in has_gradient.items() if not has]


def spare_tasks(tasks: Sequence[Task], chosen: Sequence[Task], *, seed: str) -> Iterator[Task]:
    """The tasks that are not in ``chosen``, in an order determined by ``seed``."""
    taken = {t["id"] for t in chosen}
    others = [t for t in tasks if t["id"] not in taken]
    yield from random.Random(f"{seed}:spare").sample(others, len(others))
