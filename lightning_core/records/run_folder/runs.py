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
from lightning_core.records.report import Summary, find_summary
from lightning_core.records.run_folder.lock import is_running
from lightning_core.records.run_folder.tail import MetricsTail

N = TypeVar("N", int, float)
# The one in C is ten times as fast, and not everywhere.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LARGEST = 1e300
"""JSON has integers that do not fit a float."""
_TAIL = 65_536
"""Bytes at the end of the metrics that have the newest step."""

_RUNS = Path("runs")
"""The default of ``run.dir``."""
_OF_A_RUN = ("config.yaml", "store.db", "metrics.jsonl")

State = Literal["running", "finished", "stopped"]
"""``stopped``: interrupted or failed."""


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
    """The initial weights (``policy.model``), or the model that a baseline measured (``eval.model``)."""
    tags: Sequence[str]
    reward: float | None
    """Mean training reward of the newest step."""
    summary: Summary | None
    """None unless the run is finished."""
    config: Mapping[str, Any]
    """``config.yaml`` as plain data; empty if it cannot be read."""
    damaged: Sequence[str] = ()
    """The names of the files that cannot be read, or not to their end."""

    @property
    def solved(self) -> float:
        """The reward that solves a task: ``eval.solved``."""
        value = _at(self.config, "eval", "solved")
        return float(value) if isinstance(value, int | float) else 1.0

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The steps' metrics so far, oldest first; lines that cannot be read are left out."""
        return MetricsTail(self.folder / "metrics.jsonl").read().lines


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is a run's, which may have lost a file."""
    return any((folder / name).is_file() for name in _OF_A_RUN)


def list_runs(folder: Path) -> list[RunInfo]:
    """The runs directly in ``folder``, or the run that it is; the newest first. Links such as ``latest`` are left out.

    Raises `ConfigError` if there is no such folder.
    """
    if not folder.is_dir():
        if folder.exists():
            raise ConfigError(f"{str(folder)!r} is a file; expected the folder of runs (run.dir), or of one run")
        raise ConfigError(
            f"there is no folder {str(folder)!r} in {str(Path.cwd())!r}; expected the folder of runs (run.dir), which the first "
            f"`lightning-rl train` creates, or of one run{other_runs(folder)}"
        )
    return sorted((read_run(path) for path in run_folders(folder)), key=lambda run: -run.started)


def run_folders(folder: Path) -> Iterator[Path]:
    """The folders of `list_runs`, not read and in no order."""
    if is_run(folder):
        yield folder
        return
    for path in folder.iterdir():
        if not path.is_symlink() and path.is_dir() and is_run(path):
            yield path


def missing_run(path: Path) -> str | None:
    """The problem if there is nothing at ``path``, which is in a folder of runs, or in ``runs``; None otherwise."""
    others = other_runs(path)
    is_of_runs = path.parts[:1] == _RUNS.parts and path.suffix not in (".yaml", ".yml")
    if path.exists() or not (others or is_of_runs):
        return None
    return f"there is no run {str(path)!r}{others}"


def other_runs(path: Path) -> str:
    """What to do, for the end of a message that there is no run at ``path``: the run in ``runs`` that has this name, or the command that
    lists the runs beside ``path``; empty if neither is there."""
    parent, named = path.parent, _RUNS / path
    if parent == Path() and is_run(named):
        return f"; pass {str(named)!r} for the run of this name"
    has_runs = parent != Path() and parent.is_dir() and next(run_folders(parent), None) is not None
    if path.suffix in (".yaml", ".yml") or not has_runs:
        return ""
    return f"; `lightning-rl runs {parent}` lists the runs in {str(parent)!r}"


def read_run(folder: Path) -> RunInfo:
    """The run in ``folder``. Files that are missing or damaged count as absent."""
    config = _config(folder / "config.yaml")
    metrics, is_whole = _newest_metrics(folder / "metrics.jsonl")
    steps, is_trained = _number(metrics.get("step"), int) or 0, is_running(folder)
    summary = find_summary(folder / "summary.json")
    is_read = {
        "config.yaml": bool(config),
        "metrics.jsonl": is_whole or is_trained,
        "summary.json": summary is not None,
    }
    if summary is not None and (is_trained or summary.steps < steps):
        summary = None  # of the time before the run was resumed
    model = _at(config, "eval", "model") or _at(config, "policy", "model")
    tags = _at(config, "run", "tags")
    state: State = "running" if is_trained else "stopped" if summary is None else "finished"
    return RunInfo(
        name=folder.resolve().name,
        folder=folder,
        state=state,
        started=next((folder / name).stat().st_mtime for name in _OF_A_RUN if (folder / name).is_file()),
        steps=steps,
        total_steps=_number(_at(config, "trainer", "steps"), int),
        model=None if model is None else str(model),
        tags=tuple(str(tag) for tag in tags) if isinstance(tags, list) else (),
        reward=_number(metrics.get("reward"), float),
        summary=summary,
        config=config,
        damaged=[name for name, whole in is_read.items() if not whole and (folder / name).is_file()],
    )


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _newest_metrics(path: Path) -> tuple[Mapping[str, Any], bool]:
    """The last complete line that can be read of those in the last `_TAIL` bytes, and whether it is the end of the file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            *lines, rest = file.read().split(b"\n")
    except OSError:
        return {}, False
    for number, line in enumerate(reversed(lines)):
        with suppress(ValueError):
            metrics = json.loads(line)
            if isinstance(metrics, dict):
                return metrics, number == 0 and not rest
    return {}, not lines and not rest


def _number(value: Any, kind: type[N]) -> N | None:
    """``value`` if it is a finite number; files of other versions, or damaged ones, may have anything there."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
    return kind(value) if is_number else None


def _at(config: Mapping[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
