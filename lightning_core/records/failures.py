"""Failures of the machine: what failed, and what to do. Everything else that is raised is an error of ours, of the user, or a bug."""

from __future__ import annotations

import errno
import sqlite3
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from lightning_core.errors import DISK_FULL, ConfigError, RecordError, os_problem
from lightning_core.model.out_of_memory import is_out_of_memory, out_of_memory_problem


class MachineFailure(NamedTuple):
    """A failure of the machine, for people."""

    problem: str
    advice: str
    is_disk_full: bool = False


_FREE_SPACE = "Free space on the disk, or raise the quota or the limit on the size of files"
_PERMISSION = "Change the permissions, or use a copy or another folder"
_FREE_MEMORY = "Free memory or raise its limit, or use less: lower trainer.micro_batch_tokens, rollouts.concurrency or policy.max_context"
_OS_ADVICE = {
    **dict.fromkeys(DISK_FULL, _FREE_SPACE),
    errno.EROFS: "The file system is read-only: mount it for writing, or copy the folder",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EMFILE: "Raise the limit on open files (ulimit -n), or lower rollouts.concurrency",
    errno.ENFILE: "The system has too many open files: end other programs, or raise its limit",
    errno.EAGAIN: "Raise the limit on processes and threads (ulimit -u), or lower rollouts.concurrency",
    errno.ENOMEM: _FREE_MEMORY,
    errno.EIO: "Check the disk and its file system",
    errno.ESTALE: "The network file system has lost the file: mount it again",
    errno.ENOENT: "A file or folder was removed or never existed: restore it, or correct the path",
    errno.ENOTDIR: "Correct the path",
    errno.EISDIR: "Expected a file, found a folder: correct the path",
    errno.EADDRINUSE: "Another program uses the address: stop it, or choose another port",
}
_DAMAGED = "Restore the file from a copy; checkpoints do not depend on it: `lightning-rl export` and `serve` still work"
_STORE = {
    sqlite3.SQLITE_BUSY: ("is locked by another process", "Stop the program that has it open, then continue"),
    sqlite3.SQLITE_LOCKED: ("is locked by another process", "Stop the program that has it open, then continue"),
    sqlite3.SQLITE_FULL: ("cannot be written", _FREE_SPACE),
    sqlite3.SQLITE_IOERR: ("cannot be read or written", "Check the disk and its file system"),
    sqlite3.SQLITE_READONLY: ("cannot be written", _PERMISSION),
    sqlite3.SQLITE_CANTOPEN: ("cannot be opened", _PERMISSION),
    sqlite3.SQLITE_PERM: ("cannot be opened", _PERMISSION),
    sqlite3.SQLITE_CORRUPT: ("is damaged", _DAMAGED),
    sqlite3.SQLITE_NOTADB: ("is damaged", _DAMAGED),
}
"""By SQLite's primary result code."""
_NO_SPACE = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
"""SQLite's errors of reading and writing for `DISK_FULL`."""


def failure_of(error: BaseException) -> MachineFailure | None:
    """The failure of the machine that ``error`` reports; None for any other error."""
    if isinstance(error, OSError) and error.errno is not None:
        return MachineFailure(
            os_problem(error),
            _OS_ADVICE.get(error.errno, "Remove the cause, then start the command again"),
            is_disk_full=error.errno in DISK_FULL,
        )
    if is_out_of_memory(error):
        return MachineFailure(out_of_memory_problem(error), _FREE_MEMORY)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return MachineFailure("no further thread can be started", f"{_OS_ADVICE[errno.EAGAIN]}. {_FREE_MEMORY}")
    return None


@contextmanager
def need_path(purpose: str, advice: str) -> Generator[None]:
    """Raise an `OSError` of the body, such as a missing permission, as `ConfigError`. A full disk remains an `OSError`."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise ConfigError(f"cannot {purpose}: {os_problem(error)}. {advice}") from error


def check_writable(folder: Path) -> None:
    """Raise `ConfigError` unless files can be created in the run's ``folder``: SQLite may crash in one that cannot be changed."""
    advice = "Copy the run to a folder that you may write to, and set run.dir to its parent"
    with need_path("write to the run's folder", advice), tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
        pass


class StoreErrors:
    """A context whose errors of SQLite about the store in the file ``path`` are raised as `RecordError`; others as they are."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, sqlite3.Error):
            return
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)  # set by SQLite only
        if any(words in str(error) for words in ("no such table", "no such column", "Could not decode")):
            code = sqlite3.SQLITE_CORRUPT
        known = _STORE.get(sqlite3.SQLITE_FULL if code in _NO_SPACE else code & 0xFF)
        if known is not None:
            problem, advice = known
            raise RecordError(f"the run's store {str(self._path)!r} {problem}: {error}. {advice}") from error


def causes(error: BaseException) -> Iterator[BaseException]:
    """``error``, or the errors of a group that has only one kind of them."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from causes(inner)
    else:
        yield error
