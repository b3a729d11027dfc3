"""Marks a run as running, so that no second process trains it and others can see it."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from lightning_core.errors import ConfigError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_FILE = "running.lock"


@contextmanager
def running(folder: Path) -> Generator[None]:
    """Mark the run in ``folder`` as running; the system removes the mark if the process dies.

    Raises `ConfigError` if another process trains this run. Without file locks (Windows, some network file systems) nothing is marked.
    """
    file = (folder / _FILE).open("a+")
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise ConfigError(
                    f"the run {str(folder)!r} is being trained by another process (id {owner}); wait until it ends, or stop it"
                ) from None
            except OSError:
                pass
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


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
