"""The attempts at each task over the course of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lightning_core.records.statistics.solved import ROUNDING
from lightning_core.records.store import COUNTED, LEFT_OUT, RolloutRecord, Store

TaskOrder = Literal["task_id", "attempts", "first", "last", "gain", "best", "solved"]
TASK_ORDERS: tuple[str, ...] = get_args(TaskOrder)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHistory:
    """The attempts at one task, in training or in held-out evaluations."""

    task_id: str
    held_out: bool
    attempts: int
    failures: int
    """Attempts that count in no mean: infrastructure failures and invalid rewards."""
    first_step: int
    last_step: int
    first: float | None
    last: float | None
    """The mean reward of the attempts in the first and in the last step that tried the task."""
    best: float | None
    solved: int
    """Number of attempts that solved it."""


class TaskPage(NamedTuple):
    """A part of the tasks."""

    tasks: Sequence[TaskHistory]
    total: int


def find_tasks(
    store: Store,
    *,
    text: str = "",
    solved: float = 1.0,
    order: TaskOrder = "task_id",
    descending: bool = False,
    limit: int = 100,
    offset: int = 0,
) -> TaskPage:
    """The tasks whose id contains ``text``, without forks and judges. ``solved``: the reward that solves a task."""
    if order not in TASK_ORDERS:
        raise ValueError(f"found order {order!r}, expected one of {', '.join(TASK_ORDERS)}")
    left_out = ", ".join(f"'{status}'" for status in sorted(LEFT_OUT))
    # A step's attempts share the step, so the first and last means belong to the smallest and the largest step.
    query = f"""
        WITH tried AS (
            SELECT task_id, phase != 'train' AS held_out, step, status IN ({left_out}) AS left_out,
                CASE WHEN status IN ({left_out}) THEN NULL ELSE reward END AS reward
            FROM rollouts WHERE phase NOT IN ('judge', 'fork') AND instr(lower(task_id), lower(?))
        ), steps AS (
            SELECT task_id, held_out, count(*) AS attempts, sum(left_out) AS failures, min(step) AS first_step,
                max(step) AS last_step, max(reward) AS best, sum(coalesce(reward >= ?, 0)) AS solved
            FROM tried GROUP BY task_id, held_out
        ), histories AS (
            SELECT steps.*,
                avg(CASE WHEN step = first_step THEN reward END) AS first,
                avg(CASE WHEN step = last_step THEN reward END) AS last
            FROM steps JOIN tried USING (task_id, held_out) GROUP BY task_id, held_out
        )
        SELECT *, last - first AS gain, count(*) OVER () AS total FROM histories
        ORDER BY {order} {"DESC" if descending else "ASC"} NULLS LAST, task_id, held_out LIMIT ? OFFSET ?
    """
    rows = store.select(query, text, solved - ROUNDING, limit, offset)
    names = [name for name in TaskHistory.__slots__ if name != "held_out"]
    return TaskPage(
        [TaskHistory(held_out=bool(row["held_out"]), **{name: row[name] for name in names}) for row in rows],
        int(rows[0]["total"]) if rows else 0,
    )


class RewardedAttempt(NamedTuple):
    """An attempt with a reward, without the rest of its record."""

    ordinal: int
    step: int
    phase: str
    reward: float


_ATTEMPTS = "FROM rollouts WHERE task_id = ? AND phase NOT IN ('judge', 'fork')"


def count_attempts(store: Store, task_id: str) -> int:
    """The number of attempts at one task, without forks and judges."""
    return int(store.select(f"SELECT count(*) AS number {_ATTEMPTS}", task_id)[0]["number"])


def attempts_at(store: Store, task_id: str, *, limit: int, offset: int = 0) -> list[RolloutRecord]:
    """At most ``limit`` of the attempts at one task after the first ``offset``, in the order of the run, without forks and judges."""
    return store.records(f"SELECT * {_ATTEMPTS} ORDER BY step, ordinal LIMIT ? OFFSET ?", task_id, limit, offset)


def rewarded_attempts(store: Store, task_id: str) -> list[RewardedAttempt]:
    """The attempts at one task that have a reward, in the order of the run, without forks and judges."""
    columns = ", ".join(RewardedAttempt._fields)
    query = f"SELECT {columns} {_ATTEMPTS} AND reward IS NOT NULL ORDER BY step, ordinal"
    return [RewardedAttempt(*row) for row in store.select(query, task_id)]


class Tried(NamedTuple):
    """The recent attempts at one task."""

    attempts: int
    solved: int


def recent_attempts(store: Store, *, until: int, solved: float, steps: int = 2) -> dict[str, Tried]:
    """The training attempts at each task in the last ``steps`` steps that tried it, up to step ``until``.

    Without attempts that count in no mean. ``solved``: the reward that solves a task.
    """
    query = f"""
        WITH ranked AS (
            SELECT task_id, reward, dense_rank() OVER (PARTITION BY task_id ORDER BY step DESC) AS latest
            FROM rollouts WHERE phase = 'train' AND step <= ? AND {COUNTED}
        )
        SELECT task_id, count(*) AS attempts, sum(coalesce(reward >= ?, 0)) AS solved FROM ranked WHERE latest <= ?
        GROUP BY task_id
    """
    rows = store.select(query, until, solved - ROUNDING, steps)
    return {row["task_id"]: Tried(row["attempts"], row["solved"]) for row in rows}
