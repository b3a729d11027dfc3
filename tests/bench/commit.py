"""The commit that a benchmark runs at."""

from __future__ import annotations

import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def current_commit(*paths: str) -> str:
    """The commit that is checked out, and whether tracked files in ``paths`` (git's pathspecs) were changed since."""
    commit = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    return f"{commit} with uncommitted changes" if changed else commit


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False).stdout.strip()
