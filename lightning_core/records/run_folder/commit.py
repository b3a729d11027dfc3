"""The commits of the code that a run is started and resumed from, one line each.

With files that no commit has, or without git, a line ends with a digest of the files.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lightning_core.records.atomic import write_atomically

_FILE = "commit.txt"
_SECONDS = 10.0
_LATER = re.compile(r"^from step \d+: ")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_KNOWN = re.compile(rf"{_COMMIT.pattern}|.* \(files [0-9a-f]{{16}}\)")
"""A line with everything that the code consists of."""
_MOST_FILES = 20_000
_MOST_BYTES = 2**20
"""Of larger files, the size and the time of the last change are part of a digest, not the content."""
_NO_CODE = frozenset({"__pycache__", "node_modules"})
_OUTPUT = (".log", ".out", ".err")
"""The ends of names of files into which the output of a command is usually redirected."""


def record_commit(run: Path, code: Path, *, step: int = 0) -> bool:
    """Record in the folder ``run`` the commit that is checked out in ``code``, unless it is the last one recorded.

    Returns whether another state is known from before. ``step``: number of updates that the run has made. Untracked files count as changes,
    except for ignored ones, those in the folder of the runs, and the output of commands (``*.log``, ``*.out``, ``*.err``). If git fails,
    the line has ``unknown: `` and the reason.
    """
    commit, lines, was_known = _describe(code, run.parent), recorded_commits(run), _is_known(run)
    if step and not lines:
        lines = ["unknown: not recorded"]
    if lines and _LATER.sub("", lines[-1]) == commit:
        return False
    lines.append(f"from step {step}: {commit}" if lines else commit)
    write_atomically(run / _FILE, "".join(f"{line}\n" for line in lines))
    return was_known


def commit_changed(run: Path, code: Path) -> bool:
    """Whether the code in the folder ``code`` may be another one than the last one recorded in ``run``."""
    return not _is_known(run) or _last(run) != _describe(code, run.parent)


def newer_files(run: Path, code: Path) -> list[Path]:
    """The files which are not as in the commit of ``code``, and were written or deleted after its state was last recorded in ``run``.

    Those of a folder without git are all its files. Empty if the state is not known. Deleted files are found if git tracks them.
    """
    if not _is_known(run):
        return []
    since = (run / _FILE).stat().st_mtime_ns
    found = _listing(code, run.parent)
    return sorted(file for file in {*found.changed, *islice(found.others, _MOST_FILES)} if _written_ns(file) > since)


def recorded_commits(run: Path) -> list[str]:
    """The lines of `record_commit`, oldest first, such as ``from step 20: 3f2a… with uncommitted changes``."""
    file = run / _FILE
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _last(run: Path) -> str:
    """The line of `record_commit` for the state that was last recorded; empty if there is none."""
    lines = recorded_commits(run)
    return _LATER.sub("", lines[-1]) if lines else ""


def _is_known(run: Path) -> bool:
    return _KNOWN.fullmatch(_last(run)) is not None


def _written_ns(file: Path) -> int:
    """The time of the last change in nanoseconds, also of a link's target; 0 for a folder, or a file that may not be read."""
    try:
        return 0 if file.is_dir() else max(file.lstat().st_mtime_ns, file.stat().st_mtime_ns)
    except FileNotFoundError:  # its folder was written when it was deleted
        return next(folder.stat().st_mtime_ns for folder in file.parents if folder.is_dir())
    except OSError:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """The state of a folder of code."""

    commit: str
    """The commit, or the reason why it or the changes are unknown."""
    diff: bytes = b""
    """The changes of the files that git tracks."""
    changed: Sequence[Path] = ()
    """These files."""
    others: Iterable[Path]
    """The files that git does not track; all, if the changes are unknown."""


def _describe(code: Path, runs: Path) -> str:
    found = _listing(code, runs)
    others = list(islice(found.others, _MOST_FILES + 1))
    return found.commit if _COMMIT.fullmatch(found.commit) else found.commit + _digest(found.diff, others)


def _listing(code: Path, runs: Path) -> _Listing:
    try:
        commit = _git(code, "rev-parse", "HEAD")
        top = Path(_git(code, "rev-parse", "--show-toplevel"))
    except _GitError as error:
        return _Listing(commit=f"unknown: {error}", others=_walk(code, runs))
    paths = ["--", ":/", ":(top,exclude,glob)**/__pycache__/**"]
    if runs.resolve().is_relative_to(top) and not code.resolve().is_relative_to(runs.resolve()):
        paths.append(f":(top,exclude,literal){runs.resolve().relative_to(top).as_posix()}")
    output = [f":(top,exclude,glob)**/*{end}" for end in _OUTPUT]
    try:
        diff = _git(top, "diff", "HEAD", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color", *paths)
        changed = _git(top, "diff", "HEAD", "--name-only", "-z", *paths)
        untracked = _git(top, "ls-files", "--others", "--exclude-standard", "-z", *paths, *output)
    except _GitError as error:
        return _Listing(commit=f"{commit}, changes unknown: {error}", others=_walk(code, runs))
    kind = " with uncommitted changes" if diff else " with untracked files" if untracked else ""
    return _Listing(
        commit=commit + kind,
        diff=diff.encode(errors="surrogateescape"),
        changed=_paths(top, changed),
        others=_paths(top, untracked),
    )


def _paths(top: Path, names: str) -> list[Path]:
    """The files of the output of a git command with ``-z``."""
    return [top / name for name in sorted(names.split("\0")) if name]


def _walk(code: Path, runs: Path) -> Iterator[Path]:
    """The files below ``code``, without hidden ones, environments of Python, output of commands, and the folder of the runs."""
    runs = runs.resolve()
    for folder, folders, names in os.walk(code):
        parent = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _NO_CODE
            and not (parent / name / "pyvenv.cfg").exists()
            and (parent / name).resolve() != runs
        )
        yield from (parent / name for name in sorted(names) if not name.startswith(".") and not name.endswith(_OUTPUT))


def _digest(diff: bytes, files: Sequence[Path]) -> str:
    """The end of a line: a digest of ``diff`` and the contents of ``files``. Empty if there are too many."""
    digest = hashlib.sha256(diff)
    if len(files) > _MOST_FILES:
        return ""
    for file in files:
        digest.update(f"\0{file}\0".encode(errors="surrogateescape"))
        try:
            found = file.lstat()
            is_small = file.is_file() and found.st_size <= _MOST_BYTES
            digest.update(file.read_bytes() if is_small else f"{found.st_size} {found.st_mtime_ns}".encode())
        except OSError as error:  # it may be gone, or may not be read
            digest.update(type(error).__name__.encode())
    return f" (files {digest.hexdigest()[:16]})"


class _GitError(Exception):
    """Git gave no answer."""


def _git(folder: Path, *arguments: str) -> str:
    """The output of a git command. Raises `_GitError` with the reason if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, errors="surrogateescape",
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise _GitError("git is not installed") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise _GitError(str(error)) from error
    if done.returncode != 0:
        raise _GitError(done.stderr.strip().partition("\n")[0] or f"git exited with {done.returncode}")
    return done.stdout.strip("\n")
