"""A run records the commit of the working directory."""

import subprocess
from pathlib import Path

from lightning_core.records.commit import read_commit, write_commit


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_commit_is_recorded_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    code, run = tmp_path / "code", tmp_path / "run"
    code.mkdir()
    run.mkdir()
    git(code, "init", "-q")
    (code / "agent.py").write_text("a = 1\n")
    git(code, "add", "agent.py")
    git(code, "commit", "-qm", "first")
    (code / "runs").mkdir()  # untracked files, such as those of runs, do not count
    (code / "runs" / "file").touch()
    write_commit(run, code)
    assert read_commit(run) == git(code, "rev-parse", "HEAD")
    (code / "agent.py").write_text("a = 2\n")
    write_commit(run, code)
    assert read_commit(run) == f"{git(code, 'rev-parse', 'HEAD')} with uncommitted changes"


def test_without_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    write_commit(tmp_path, tmp_path)
    assert read_commit(tmp_path) is None
    assert not list(tmp_path.iterdir())
