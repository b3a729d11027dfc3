"""Curves of a run from its store, each in one query."""

from __future__ import annotations

import math
from functools import lru_cache

from lightning_core.records.intervals import Estimate, confidence_interval
from lightning_core.records.results import EVALUATIONS
from lightning_core.records.store import LEFT_OUT, Store

_COUNTED = f"status NOT IN ({', '.join(repr(status) for status in sorted(LEFT_OUT))})"


def training_errors(store: Store, *, after: int = 0) -> dict[int, float]:
    """The standard error of the mean training reward of each step later than ``after``.

    The sample is the tasks: attempts at a task are not independent, so they are averaged first. Steps with one task have none.
    """
    rows = store.select(
        "WITH tasks AS (SELECT step, avg(coalesce(reward, 0)) AS reward FROM rollouts "
        f"WHERE phase = 'train' AND step >= ? AND {_COUNTED} GROUP BY step, task_id) "
        "SELECT step, count(*) AS number, avg(reward) AS mean, avg(reward * reward) AS square FROM tasks "
        "GROUP BY step HAVING number > 1",
        after,
    )
    # Rollouts are stored with the number of updates before them, metrics with the number after the update.
    return {
        row["step"] + 1: math.sqrt(max(0.0, row["square"] - row["mean"] ** 2) / (row["number"] - 1))
        for row in rows
        if row["square"] is not None
    }


def held_out_curve(store: Store) -> dict[int, Estimate]:
    """The mean held-out reward with its 95% interval, by the number of updates before the evaluation."""
    return {step: _interval(tuple(tasks.values())) for step, tasks in held_out_tasks(store).items()}


def held_out_tasks(store: Store) -> dict[int, dict[str, float]]:
    """The mean reward of each held-out task, by the number of updates before the evaluation: of the last one there."""
    places = ", ".join("?" for _ in EVALUATIONS)
    rows = store.select(
        "SELECT step, phase, task_id, avg(coalesce(reward, 0)) AS reward FROM rollouts "
        f"WHERE phase IN ({places}) AND {_COUNTED} GROUP BY step, phase, task_id ORDER BY task_id",
        *EVALUATIONS,
    )
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["step"], EVALUATIONS.index(row["phase"])), {})[row["task_id"]] = row["reward"]
    return {step: tasks for (step, _), tasks in sorted(found.items())}


@lru_cache(maxsize=1024)
def _interval(rewards: tuple[float, ...]) -> Estimate:
    """`confidence_interval`, which resamples: finished evaluations do not change, and viewers read them again and again."""
    return confidence_interval(rewards)
