"""The commit of the code that a run is started from."""

from __future__ import annotations

import subprocess
from pathlib import Path

_FILE = "commit.txt"
_SECONDS = 10.0


def write_commit(run: Path, code: Path) -> None:
    """Record in the folder ``run`` the commit that is checked out in ``code``; nothing if that is no git repository."""
    commit = _git(code, "rev-parse", "HEAD")
    if commit is None:
        return
    changed = _git(code, "status", "--porcelain", "--untracked-files=no")
    (run / _FILE).write_text(f"{commit}{' with uncommitted changes' if changed else ''}\n", encoding="utf-8")


def read_commit(run: Path) -> str | None:
    """What `write_commit` recorded, such as ``3f2a… with uncommitted changes``; None if nothing."""
    file = run / _FILE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails, if it takes too long, or without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
