"""The rewards of held-out tasks in a store, computed by the database."""

from __future__ import annotations

from collections.abc import Collection

from lightning_core.errors import ConfigError, plural
from lightning_core.records.store import COUNTED, Phase, Store

EVALUATIONS: tuple[Phase, ...] = ("eval_before", "eval", "eval_after")
"""The phases of a run's own evaluations, of finished ones only."""


def held_out_by_task(store: Store) -> dict[int, dict[str, float]]:
    """The mean reward of each held-out task, by the number of updates before the evaluation: of the last one there."""
    places = ", ".join("?" for _ in EVALUATIONS)
    rows = store.select(
        "SELECT step, phase, task_id, avg(coalesce(reward, 0)) AS reward FROM rollouts "
        f"WHERE phase IN ({places}) AND {COUNTED} GROUP BY step, phase, task_id ORDER BY task_id",
        *EVALUATIONS,
    )
    rewards: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        rewards.setdefault((row["step"], EVALUATIONS.index(row["phase"])), {})[row["task_id"]] = row["reward"]
    return {step: tasks for (step, _), tasks in sorted(rewards.items())}


def check_held_out(store: Store, ids: Collection[str]) -> bool:
    """Whether the evaluation before training is recorded. Raises `ConfigError` if it has other tasks than ``ids``."""
    rows = store.select("SELECT DISTINCT task_id FROM rollouts WHERE phase = 'eval_before' ORDER BY task_id")
    recorded = {row["task_id"]: None for row in rows}
    changed = {
        "new": [task for task in ids if task not in recorded],
        "missing": [task for task in recorded if task not in ids],
    }
    if recorded and any(changed.values()):
        found = " and ".join(
            f"{plural(len(tasks), 'task')} {how}, such as {tasks[0]!r}" for how, tasks in changed.items() if tasks
        )
        raise ConfigError(
            f"run.resume: the held-out tasks are not those of the run's evaluation before training: {found}. Restore tasks.eval and "
            "eval.tasks, or start a new run from the run's weights (policy.model)"
        )
    return bool(recorded)
