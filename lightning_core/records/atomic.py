"""Writes the small files and links of runs atomically: a reader, or a power failure, never finds a part of one."""

from __future__ import annotations

import os
from pathlib import Path

_SCRATCH = ".new"


def write_atomically(path: Path, text: str, *, times: tuple[int, int] | None = None) -> None:
    """Write ``text`` to the file ``path``. ``times``: of its last access and change, in nanoseconds; None: now."""
    scratch = _scratch(path)
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if times is not None:
        os.utime(scratch, ns=times)
    scratch.replace(path)


def link_atomically(path: Path, target: str) -> None:
    """Make ``path`` a link to ``target``, also if it exists."""
    scratch = _scratch(path)
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(target)
    scratch.replace(path)


def is_scratch(path: Path) -> bool:
    """Whether ``path`` is a file that a killed process was about to move into place."""
    return path.name.startswith(".") and path.name.endswith(_SCRATCH)


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}-{os.getpid()}{_SCRATCH}")
