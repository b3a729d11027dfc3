"""Files of a run with verl besides the store: verl's log, the error that stopped the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_core import errors
from lightning_core.errors import LightningError, TrainingError, describe
from lightning_core.records.atomic import write_atomically
from lightning_core.rollouts.counts import counts_to_metrics

FAILURE = "failure.json"
"""The exception that stopped the run.

Written by the manager, raised by the process that started the run.
"""
LOG = "verl.jsonl"
"""verl's metrics, written by its file logger."""
_STALENESS = "training/off_policy/trajectory_staleness/mean"
"""verl's metric when rows are trained on, which is after they were counted."""
_ARCHIVED_LOG = "verl.before.jsonl"
"""verl's metrics before the run was resumed."""


def write_failure(folder: Path, error: BaseException) -> None:
    """Write the error that stopped the run."""
    known = isinstance(error, LightningError) and getattr(errors, type(error).__name__, None) is type(error)
    name, message = (type(error).__name__, str(error)) if known else (TrainingError.__name__, describe(error))
    write_atomically(folder / FAILURE, json.dumps({"type": name, "message": message}))


def read_failure(folder: Path) -> LightningError | None:
    """The error that `write_failure` wrote, if any: one of `errors`; others are a `TrainingError` with their description."""
    path = folder / FAILURE
    if not path.is_file():
        return None
    written = json.loads(path.read_text(encoding="utf-8"))
    kind: Any = getattr(errors, written["type"])
    error: LightningError = kind.__new__(kind)  # some have other arguments than their message
    error.args = (written["message"],)
    return error


def archive_log(folder: Path, *, after: int) -> None:
    """Move verl's log to the archive, without the steps after ``after``. verl starts a new log when it resumes."""
    entries = _logged(folder)
    lines = [f"{json.dumps({'step': step, 'data': data})}\n" for step, data in entries.items() if step <= after]
    write_atomically(folder / _ARCHIVED_LOG, "".join(lines))
    (folder / LOG).unlink(missing_ok=True)


def evaluated_steps(folder: Path) -> set[int]:
    """The numbers of updates after which an evaluation finished."""
    return {step for step, data in _logged(folder).items() if any(key.startswith("val-") for key in data)}


def _logged(folder: Path) -> dict[int, dict[str, Any]]:
    """verl's metrics by step, without an incomplete last line."""
    logged: dict[int, dict[str, Any]] = {}
    for path in (folder / _ARCHIVED_LOG, folder / LOG):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else ():
            entry = json.loads(line)
            logged.setdefault(int(entry["step"]), {}).update(entry["data"])
    return logged


def read_metrics_of_verl(
    folder: Path, steps: Mapping[int, Mapping[str, float]], *, rows_per_update: int
) -> list[dict[str, Any]]:
    """The metrics of each step: from the counts in ``steps``, and verl's own as ``verl/…``.

    ``rows_padding_share``: the share of empty rows that verl pads the step's updates with.
    """
    logged = _logged(folder)
    metrics: list[dict[str, Any]] = []
    for step, counts in steps.items():
        rows = int(counts["rows"])
        padding = -rows % rows_per_update
        numbers = {key: value for key, value in logged.get(step, {}).items() if isinstance(value, int | float)}
        metrics.append({
            "step": step,
            **counts_to_metrics(counts),
            **({"staleness": numbers[_STALENESS]} if _STALENESS in numbers else {}),
            "rows_padding_share": padding / (rows + padding) if rows else 0.0,
            **{f"verl/{key}": value for key, value in numbers.items()},
        })  # fmt: skip
    return metrics
