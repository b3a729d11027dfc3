"""The rewards of held-out tasks in a store, computed by the database."""

from __future__ import annotations

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
