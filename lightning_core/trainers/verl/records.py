"""What a run with verl leaves in its folder besides the store, and how it is read: verl's log, counts of each step, what stopped it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_core.errors import TrainingError
from lightning_core.rollouts.counts import counts_to_metrics
from lightning_core.trace import describe

FAILURE = "failure.pickle"
"""What stopped the run: an exception, written by the manager for whoever started it."""
LOG = "verl.jsonl"
"""verl's metrics, by its own logger."""
_EARLIER = "verl.before.jsonl"


def write_failure(folder: Path, error: BaseException) -> None:
    """Write down what stopped the run. An error that cannot travel is told in words."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - an agent's own exceptions may be anything
        data = pickle.dumps(TrainingError(describe(error)))
    (folder / FAILURE).write_bytes(data)


def keep_log(folder: Path) -> None:
    """Put away the log of the run so far: verl begins anew when it resumes."""
    log = folder / LOG
    if log.is_file():
        with (folder / _EARLIER).open("a", encoding="utf-8") as earlier:
            earlier.write(log.read_text(encoding="utf-8"))
        log.unlink()


def read_metrics_of_verl(
    folder: Path, steps: Mapping[int, Mapping[str, float]], *, rows_per_update: int
) -> list[dict[str, Any]]:
    """One mapping a step: of its rollouts what the manager counted (``steps``), of the update verl's own metrics as ``verl/…``.

    ``rows_padding_share``: the share of empty rows that verl fills updates up with.
    """
    logged: dict[int, dict[str, Any]] = {}
    for name in (_EARLIER, LOG):
        path = folder / name
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            entry = json.loads(line)
            logged.setdefault(int(entry["step"]), {}).update(entry["data"])
    metrics: list[dict[str, Any]] = []
    for step, counts in steps.items():
        rows = int(counts["rows"])
        padding = -rows % rows_per_update
        numbers = {key: value for key, value in logged.get(step, {}).items() if isinstance(value, int | float)}
        metrics.append({
            "step": step,
            **counts_to_metrics(counts),
            "rows_padding_share": padding / (rows + padding) if rows else 0.0,
            **{f"verl/{key}": value for key, value in numbers.items()},
        })  # fmt: skip
    return metrics
