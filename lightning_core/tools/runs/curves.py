"""Curves of a run from its store, each in one query."""

from __future__ import annotations

import math
from functools import lru_cache

from lightning_core.records.statistics.held_out import held_out_by_task
from lightning_core.records.statistics.intervals import Estimate, confidence_interval
from lightning_core.records.store import COUNTED, Store


def training_errors(store: Store, *, after: int = 0) -> dict[int, float]:
    """The standard error of the mean training reward of each step later than ``after``.

    The sample is the tasks: attempts at a task are not independent, so they are averaged first. Steps with one task have none.
    """
    rows = store.select(
        "WITH tasks AS (SELECT step, avg(coalesce(reward, 0)) AS reward FROM rollouts "
        f"WHERE phase = 'train' AND step > ? AND {COUNTED} GROUP BY step, task_id) "
        "SELECT step, count(*) AS number, avg(reward) AS mean, avg(reward * reward) AS square FROM tasks "
        "GROUP BY step HAVING number > 1",
        after,
    )
    return {
        row["step"]: math.sqrt(max(0.0, row["square"] - row["mean"] ** 2) / (row["number"] - 1))
        for row in rows
        if row["square"] is not None
    }


def held_out_curve(store: Store) -> dict[int, Estimate]:
    """The mean held-out reward with its 95% interval, by the number of updates before the evaluation."""
    return {step: _interval(tuple(tasks.values())) for step, tasks in held_out_by_task(store).items()}


@lru_cache(maxsize=1024)
def _interval(rewards: tuple[float, ...]) -> Estimate:
    """`confidence_interval`, which resamples: finished evaluations do not change, and viewers read them again and again."""
    return confidence_interval(rewards)
