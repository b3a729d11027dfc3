"""The values that built-in trackers report of metrics, evaluations and results. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_core.errors import redact_urls
from lightning_core.records.results import Evaluation, Result
from lightning_core.records.run_folder.configs import leaves
from lightning_core.records.run_folder.manifest import OPTIMIZER
from lightning_core.records.statistics.intervals import confidence_interval

PROJECT = "lightning-rl"
"""The project, or experiment, of runs whose tracker names no other."""
FILES = ("config.yaml", "summary.json", "curve.png")
"""The files of a run's folder that are reported as artifacts."""


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers in ``values``; nothing else can be drawn as a curve."""
    return {k: float(v) for k, v in values.items() if isinstance(v, Real) and math.isfinite(v)}


def evaluation_values(evaluation: Evaluation) -> dict[str, float]:
    """The mean held-out reward with its 95% interval, and the number of tasks and of rollouts left out."""
    means = [fmean(rewards) for rewards in evaluation.rewards.values()]
    values = {"eval/tasks": float(len(means)), "eval/left_out": float(evaluation.left_out)}
    if means:
        mean, low, high = confidence_interval(means)
        values |= {"eval/reward": mean, "eval/reward_low": low, "eval/reward_high": high}
    return finite(values)


def summary_values(result: Result) -> dict[str, float]:
    """The numbers in ``summary.json``, each with the prefix ``summary/``; the ends of an interval are ``_low`` and ``_high``."""
    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    return finite({f"summary/{key}": value for key, value in _numbers(summary)})


def artifacts(folder: Path) -> list[Path]:
    """The files of the run in ``folder`` that are reported, as far as they exist and have no URL with credentials."""
    found = [path for name in FILES if (path := folder / name).is_file()]
    return [path for path in found if path.suffix != ".yaml" or _is_public(path.read_text(encoding="utf-8"))]


def _is_public(text: str) -> bool:
    return redact_urls(text) == text


def without_credentials(value: Any) -> Any:
    """JSON without the credentials in its URLs."""
    if isinstance(value, str):
        return redact_urls(value)
    if isinstance(value, dict):
        return {key: without_credentials(inner) for key, inner in value.items()}
    return [without_credentials(inner) for inner in value] if isinstance(value, list) else value


def checkpoint_files(checkpoint: Path) -> dict[str, Path]:
    """The files of ``checkpoint`` by relative path, without the optimizer's state."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != OPTIMIZER)
    return {path.relative_to(checkpoint).as_posix(): path for path in files}


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    return {".".join(path): value for path, value in leaves(values)}


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in flat(values).items():
        if isinstance(value, list) and len(value) == 2:
            yield from ((f"{key}_low", value[0]), (f"{key}_high", value[1]))
        else:
            yield key, value
