"""Marks a run as running, so no second process trains it and others can see it."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from lightning_core.errors import ConfigError
from lightning_core.records.failures import check_writable

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_FILE = "running.lock"
_PATIENCE = 1.0
"""Seconds that a lock is waited for."""
_held: set[TextIO] = set()


def _close_in_child() -> None:
    # A lock lasts until every copy of the file is closed: a child that an agent forked could keep it after the run has died.
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def running(folder: Path) -> Generator[None]:
    """Mark the run in ``folder`` as running; the system removes the mark if the process dies.

    Raises `ConfigError` if another process trains this run. Without file locks (Windows, some network file systems) nothing is marked.
    """
    check_writable(folder)
    file = (folder / _FILE).open("a+")
    with file:
        _lock(file, folder)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)


def _lock(file: TextIO, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not try_lock(file):
        # `is_running` of another process holds the lock for a moment.
        if time.monotonic() > deadline:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise ConfigError(
                f"the run {str(folder)!r} is being trained by another process (id {owner}); wait until it ends, or stop it"
            )
        time.sleep(_PATIENCE / 20)


def try_lock(file: TextIO) -> bool:
    """Lock ``file`` as long as it is open; return False if another process has locked it. True without file locks."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def is_running(folder: Path) -> bool:
    """Whether a process on this machine trains the run in ``folder``. False without file locks."""
    try:
        file = (folder / _FILE).open()
    except OSError:
        return False
    with file:
        if fcntl is None:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
