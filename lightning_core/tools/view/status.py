"""The status of a run: progress, time left and failed rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from lightning_core.records.ledger import general_reason
from lightning_core.records.run_folder.runs import RunInfo
from lightning_core.records.store import LEFT_OUT, Store

_RECENT = 10


class Failure(NamedTuple):
    """Rollouts that failed for one reason."""

    reason: str
    """The first sentence of the error, without the values in it."""
    rollouts: int
    first: int
    """The ordinal of the first of these rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The rollouts in a store."""

    training: int = 0
    evaluation: int = 0
    failed: int = 0
    """Rollouts in which the agent failed."""
    left_out: int = 0
    """Rollouts with an infrastructure failure or an invalid reward."""
    current: int = 0
    """Training rollouts of the step that is running."""


def count_rollouts(store: Store, *, steps: int) -> Counts:
    """The rollouts in ``store``; ``steps``: number of steps that are done."""
    rows = store.select(
        "SELECT phase, status, count(*) AS number, sum(step = ?) AS newest FROM rollouts GROUP BY phase, status",
        steps + 1,
    )
    training = [row for row in rows if row["phase"] == "train"]
    return Counts(
        training=sum(row["number"] for row in training),
        evaluation=sum(row["number"] for row in rows if row["phase"].startswith("eval")),
        failed=sum(row["number"] for row in rows if row["status"] in ("failed", "masked")),
        left_out=sum(row["number"] for row in rows if row["status"] in LEFT_OUT),
        current=sum(row["newest"] for row in training),
    )


def failures(store: Store, *, most: int = 5) -> list[Failure]:
    """The most frequent reasons why rollouts in ``store`` failed or were left out."""
    rows = store.select(
        "SELECT error, status, count(*) AS number, min(ordinal) AS first FROM rollouts "
        "WHERE status != 'ok' GROUP BY error, status ORDER BY first"
    )
    numbers, first = Counter[str](), dict[str, int]()
    for row in rows:
        reason = general_reason(row["error"]) if row["error"] else row["status"]
        numbers[reason] += row["number"]
        first.setdefault(reason, row["first"])
    return [Failure(reason, number, first[reason]) for reason, number in numbers.most_common(most)]


def seconds_left(run: RunInfo, metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of the remaining steps at the pace of the last ones, without evaluations."""
    if run.state != "running" or not run.total_steps:
        return None
    phases = [(line.get("seconds_rollouts"), line.get("seconds_update")) for line in metrics[-_RECENT:]]
    seconds = [a + b for a, b in phases if isinstance(a, int | float) and isinstance(b, int | float)]
    return fmean(seconds) * max(0, run.total_steps - len(metrics)) if seconds else None
