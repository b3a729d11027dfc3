"""Counts of a batch and the metrics computed from them. The same for every trainer.

Counts are sums, so that the counts of a step's groups can be added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_core.records.store import LEFT_OUT
from lightning_core.rollouts.runner import Rollout
from lightning_core.transitions import Row

_CONTEXTS = ("new", "clean", "realigned", "forked")


def count_rollouts(rollouts: Sequence[Rollout], *, lost: int = 0) -> dict[str, float]:
    """Rollouts by status, the sum of their rewards, and their calls by context.

    ``context``: how the prompt continues earlier ones.

    ``lost``: number of jobs without a rollout. They count as left out.
    """
    finished = [r for r in rollouts if r.status not in LEFT_OUT]
    calls = [c for r in rollouts for c in r.trace.calls if c.context is not None]
    return {
        "reward_sum": math.fsum(r.reward for r in finished),
        "rollouts": len(rollouts) + lost,
        "rollouts_failed": sum(r.status == "failed" for r in rollouts),
        "rollouts_invalid": sum(r.status == "invalid" for r in rollouts),
        "rollouts_left_out": len(rollouts) + lost - len(finished),
        "rollouts_without_calls": sum(not any(c.trained for c in r.trace.calls) for r in finished),
        **{f"context_{kind}": sum(c.context == kind for c in calls) for kind in _CONTEXTS},
    }


def count_rows(rows: Sequence[Row]) -> dict[str, float]:
    """Rows, the rollouts they come from, and their trained tokens."""
    return {
        "rows": len(rows),
        "rollouts_trained": len({row.rollout for row in rows}),
        "tokens_trained": sum(int(row.mask.sum()) for row in rows),
    }


def add_counts(total: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """The sums of both."""
    return {key: total.get(key, 0) + more.get(key, 0) for key in {**total, **more}}


def counts_to_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step: the counts, the mean reward in place of the sum, rows per rollout."""
    rest = {key: value for key, value in counts.items() if key not in ("reward_sum", "rollouts_trained")}
    finished = counts["rollouts"] - counts["rollouts_left_out"]
    metrics = {"reward": counts["reward_sum"] / finished if finished else 0.0, **rest}
    if "rollouts_trained" in counts:  # absent in the sums of older runs with verl
        metrics["rows_per_rollout"] = counts["rows"] / max(1, counts["rollouts_trained"])
    return metrics
