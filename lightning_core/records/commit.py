"""The commits of the code that a run is started and resumed from, one line each."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

_FILE = "commit.txt"
_SECONDS = 10.0
_LATER = re.compile(r"^from step \d+: ")


def record_commit(run: Path, code: Path, *, step: int = 0) -> None:
    """Record in the folder ``run`` the commit that is checked out in ``code``, unless it is the last one recorded.

    ``step``: number of updates that the run has made. Untracked files count as changes, except for ignored ones and those
    in the folder of the runs. If git fails, the line ends with ``unknown: `` and the reason.
    """
    commit, lines = _describe(code, run.parent), recorded_commits(run)
    if step and not lines:
        lines = ["unknown: not recorded"]
    if not lines or _LATER.sub("", lines[-1]) != commit:
        lines.append(f"from step {step}: {commit}" if lines else commit)
        (run / _FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def commit_changed(run: Path, code: Path) -> bool:
    """Whether another commit is checked out in ``code`` than the last one recorded in ``run``; also if there is none."""
    lines = recorded_commits(run)
    return not lines or _LATER.sub("", lines[-1]) != _describe(code, run.parent)


def recorded_commits(run: Path) -> list[str]:
    """The lines of `record_commit`, oldest first, such as ``from step 20: 3f2a… with uncommitted changes``."""
    file = run / _FILE
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _describe(code: Path, runs: Path) -> str:
    try:
        commit = _git(code, "rev-parse", "HEAD")
        top = Path(_git(code, "rev-parse", "--show-toplevel"))
    except _GitError as error:
        return f"unknown: {error}"
    paths = [":/"]
    excluded = runs.resolve()
    if excluded.is_relative_to(top) and not code.resolve().is_relative_to(excluded):
        paths.append(f":(top,exclude,literal){excluded.relative_to(top).as_posix()}")
    try:
        changes = _git(code, "status", "--porcelain", "--untracked-files=normal", "--", *paths).splitlines()
    except _GitError as error:
        return f"{commit}, changes unknown: {error}"
    if not changes:
        return commit
    only_untracked = all(line.startswith("??") for line in changes)
    return f"{commit} with {'untracked files' if only_untracked else 'uncommitted changes'}"


class _GitError(Exception):
    """Git gave no answer."""


def _git(folder: Path, *arguments: str) -> str:
    """The output of a git command. Raises `_GitError` with the reason if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise _GitError("git is not installed") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise _GitError(str(error)) from error
    if done.returncode != 0:
        raise _GitError(done.stderr.strip().partition("\n")[0] or f"git exited with {done.returncode}")
    return done.stdout.strip("\n")
