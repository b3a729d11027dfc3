"""The runs in a folder, as they are listed: name, state, progress and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lightning_core.errors import ConfigError
from lightning_core.records.lock import is_running
from lightning_core.records.report import Summary, read_metrics, read_summary

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


def read_run(folder: Path) -> RunInfo:
    """The run in ``folder``. Files that are missing or damaged count as absent."""
    config = _config(folder / "config.yaml")
    metrics = _newest_metrics(folder / "metrics.jsonl")
    summary = _summary(folder / "summary.json")
    state: State = "running" if is_running(folder) else "stopped" if summary is None else "finished"
    return RunInfo(
        name=folder.resolve().name,
        folder=folder,
        state=state,
        started=(folder / "config.yaml").stat().st_mtime,
        steps=int(metrics.get("step", 0)),
        total_steps=_at(config, "trainer", "steps"),
        model=_at(config, "policy", "model"),
        tags=tuple(_at(config, "run", "tags") or ()),
        reward=metrics.get("reward"),
        summary=summary,
        config=config,
    )


def run_folders(folder: Path) -> Iterator[Path]:
    """The folders of the runs directly in ``folder``, or ``folder`` if it is a run's, in any order."""
    if is_run(folder):
        yield folder
        return
    for found in folder.iterdir():
        if not found.is_symlink() and found.is_dir() and is_run(found):
            yield found


def _config(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _newest_metrics(path: Path) -> Mapping[str, Any]:
    try:
        found = read_metrics(path)
    except (OSError, ValueError):
        return {}
    return found[-1] if found else {}


def _summary(path: Path) -> Summary | None:
    try:
        return read_summary(path)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _at(config: Mapping[str, Any], *keys: str) -> Any:
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found
