"""Removes runs from the folder of runs."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_core.errors import ConfigError, RecordError
from lightning_core.records.atomic import link_atomically
from lightning_core.records.run_folder.lock import is_running, running
from lightning_core.records.run_folder.runs import is_run, list_runs
from lightning_core.records.store import Store

_LATEST = "latest"
_BEFORE_ROLLOUTS = {"config.yaml", "commit.txt", "run.id", "running.lock", "store.db", "store.db-wal", "store.db-shm"}
"""The files of a run that has done nothing yet, if its store is empty."""


def check_removable(parent: Path, names: Sequence[str]) -> list[Path]:
    """The folders of the runs ``names`` directly in ``parent``.

    Raises `ConfigError` for anything else, for a link, and for a run that a process trains.
    """
    return [_checked(parent, name) for name in dict.fromkeys(names)]


def _checked(parent: Path, name: str) -> Path:
    folder = parent / name
    if folder.is_symlink():
        raise ConfigError(f"{name!r} is a link to {str(folder.readlink())!r}; name that run itself")
    if folder.name != name or folder.resolve().parent != parent.resolve() or not is_run(folder):
        raise ConfigError(
            f"{name!r} is not the name of a run in {str(parent)!r}; expected a folder in it with config.yaml or store.db"
        )
    if is_running(folder):
        raise ConfigError(f"the run {name!r} is being trained; wait until it ends, or stop it, before you remove it")
    return folder


def remove_runs(folders: Sequence[Path]) -> None:
    """Delete ``folders``, and link the newest of the remaining runs as ``latest`` if the link's run is gone."""
    for folder in folders:
        # The files that make it a run go last: after an interruption it is still listed, and can be removed again.
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "config.yaml":
                path.unlink()
        shutil.rmtree(folder)
    for parent in {folder.parent for folder in folders}:
        _repair_latest(parent)


@contextmanager
def removed_if_unused(folder: Path) -> Generator[None]:
    """Remove the run in ``folder`` if the body raises before its first rollout, such as for a model that cannot be loaded."""
    try:
        yield
    except BaseException:
        with suppress(OSError, RecordError):
            if _is_unused(folder):
                remove_runs([folder])
        raise


@contextmanager
def started(folder: Path) -> Generator[None]:
    """Mark the run in ``folder`` as running (`running`). Removed if it fails before its first rollout."""
    with removed_if_unused(folder), running(folder):
        yield


def _is_unused(folder: Path) -> bool:
    if not {path.name for path in folder.iterdir()} <= _BEFORE_ROLLOUTS:
        return False
    if not (folder / "store.db").exists():
        return True
    with Store(folder / "store.db", read_only=True) as store:
        return not store.rollouts(last=1)


def _repair_latest(parent: Path) -> None:
    latest = parent / _LATEST
    if not latest.is_symlink() or latest.exists():
        return
    left = list_runs(parent)
    if not left:
        latest.unlink()
        return
    link_atomically(latest, left[0].folder.name)
