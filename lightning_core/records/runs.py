"""The runs in a folder, as they are listed: name, state, progress and results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from lightning_core.errors import ConfigError
from lightning_core.records.lock import is_running
from lightning_core.records.report import Summary, read_metrics, read_summary

N = TypeVar("N", int, float)
# The one in C is ten times as fast, and not everywhere.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LARGEST = 1e300
"""JSON has integers that are no floats."""
_TAIL = 65_536
"""Bytes at the end of the metrics that have the newest step."""

State = Literal["running", "finished", "stopped"]
"""``stopped``: interrupted, failed, or an evaluation without training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run's folder, read without its store."""

    name: str
    folder: Path
    state: State
    started: float
    """Seconds since the epoch."""
    steps: int
    """Number of updates so far."""
    total_steps: int | None
    model: str | None
    tags: Sequence[str]
    reward: float | None
    """Mean training reward of the newest step."""
    summary: Summary | None
    config: Mapping[str, Any]
    """``config.yaml`` as plain data; empty if it cannot be read."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The steps' metrics so far, oldest first."""
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.is_file() else []


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is a run's."""
    return (folder / "config.yaml").is_file()


def list_runs(folder: Path) -> list[RunInfo]:
    """The runs directly in ``folder``, or the run that it is; the newest first. Links such as ``latest`` are left out.

    Raises `ConfigError` if there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is not a folder; expected the folder of runs (run.dir), or that of one run")
    return sorted((read_run(found) for found in run_folders(folder)), key=lambda run: -run.started)


def run_folders(folder: Path) -> Iterator[Path]:
    """The folders of `list_runs`, not read and in no order."""
    if is_run(folder):
        yield folder
        return
    for found in folder.iterdir():
        if not found.is_symlink() and found.is_dir() and is_run(found):
            yield found


def read_run(folder: Path) -> RunInfo:
    """The run in ``folder``. Files that are missing or damaged count as absent."""
    config = _config(folder / "config.yaml")
    metrics = _newest_metrics(folder / "metrics.jsonl")
    summary = _summary(folder / "summary.json")
    model, tags = _at(config, "policy", "model"), _at(config, "run", "tags")
    state: State = "running" if is_running(folder) else "stopped" if summary is None else "finished"
    return RunInfo(
        name=folder.resolve().name,
        folder=folder,
        state=state,
        started=(folder / "config.yaml").stat().st_mtime,
        steps=_number(metrics.get("step"), int) or 0,
        total_steps=_number(_at(config, "trainer", "steps"), int),
        model=None if model is None else str(model),
        tags=tuple(str(tag) for tag in tags) if isinstance(tags, list) else (),
        reward=_number(metrics.get("reward"), float),
        summary=summary,
        config=config,
    )


def _config(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _newest_metrics(path: Path) -> Mapping[str, Any]:
    """The last complete line that can be read of those in the last `_TAIL` bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _summary(path: Path) -> Summary | None:
    try:
        return read_summary(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _number(value: Any, kind: type[N]) -> N | None:
    """``value`` if it is a finite number; files of other versions, or damaged ones, may have anything there."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
    return kind(value) if is_number else None


def _at(config: Mapping[str, Any], *keys: str) -> Any:
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found
