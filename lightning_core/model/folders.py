"""Writes folders of models atomically, with the permissions of the umask."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_PARTIAL = ".partial"


@contextmanager
def whole(folder: Path) -> Generator[Path]:
    """Yield a temporary sibling folder, which replaces ``folder`` once the block succeeds and its files are on disk.

    Also removes the temporary folders that killed processes left for ``folder``. Raises `OSError` if the disk is full, even
    if safetensors detects it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent, re.escape(folder.name))
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-", suffix=_PARTIAL))
    lock = os.open(scratch, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems lock no folders; leftovers then stay
            _lock(lock)
        with _os_errors(folder):
            yield scratch
            apply_umask(scratch)
            for path in (*scratch.rglob("*"), scratch):
                _sync(path)
        replaced = scratch.with_name(f"{scratch.name}-replaced")
        if folder.exists():  # moved aside, so one of the two is whole at any time
            folder.rename(replaced)
        scratch.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def apply_umask(folder: Path) -> None:
    """Give ``folder`` and everything in it the permissions of new files: safetensors and `tempfile` create private ones."""
    probe = folder / ".permissions"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in (*folder.rglob("*"), folder):
        path.chmod(mode | (mode & 0o444) >> 2 if path.is_dir() else mode)


def remove_leftovers(parent: Path, names: str = ".+") -> None:
    """Remove the temporary folders of `whole` in ``parent`` that killed processes left. ``names``: a pattern of the folders' names."""
    pattern = re.compile(rf"\.{names}-[a-z0-9_]+{re.escape(_PARTIAL)}(-replaced)?")
    for path in parent.iterdir():
        if pattern.fullmatch(path.name):
            with suppress(OSError):  # in use by a live process, or without permission
                lock = os.open(path, os.O_RDONLY)
                try:
                    _lock(lock)
                    shutil.rmtree(path)
                finally:
                    os.close(lock)


def _lock(folder: int) -> None:
    """Mark a folder as in use until it is closed or the process ends. Raises `OSError` if another process marked it."""
    import fcntl  # POSIX only; other functions of this module are used without

    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def _os_errors(folder: Path) -> Generator[None]:
    """Raise system errors of safetensors and tokenizers as `OSError`, and name ``folder`` in those without a path."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(folder)
        raise
    except Exception as error:  # tokenizers has no exception class
        match = re.search(r"\(os error (\d+)\)$", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(folder)) from error


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
