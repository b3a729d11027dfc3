"""A run records the commits of the working directory that it was started and resumed from."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from lightning_core import load_config
from lightning_core.records.run_folder.commit import commit_changed, newer_files, record_commit, recorded_commits
from lightning_core.records.run_folder.folder import open_run_folder, record_resume
from tests.empty_checkpoint import make_empty_checkpoint


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A repository with one commit of one file."""
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "agent.py").write_text("a = 1\n")
    git(folder, "add", "agent.py")
    git(folder, "commit", "-qm", "first")
    return folder


def recorded(run: Path, code: Path) -> str:
    """The one commit that a new run in the folder ``run`` records."""
    run.mkdir(parents=True)
    record_commit(run, code)
    (line,) = recorded_commits(run)
    return line


def test_the_commit_is_recorded_and_whether_files_differ_from_it(code: Path) -> None:
    head = git(code, "rev-parse", "HEAD")
    assert recorded(code / "runs" / "clean", code) == head, "the folder of the runs does not count"
    (code / "new.py").touch()
    git(code, "config", "status.showUntrackedFiles", "no")
    assert re.fullmatch(
        rf"{head} with untracked files \(files [0-9a-f]{{16}}\)", recorded(code / "runs" / "untracked", code)
    )
    (code / "agent.py").write_text("a = 2\n")
    assert recorded(code / "runs" / "changed", code).startswith(f"{head} with uncommitted changes (files ")


def test_files_outside_of_the_working_directory_count_and_ignored_ones_do_not(code: Path, tmp_path: Path) -> None:
    (code / "agents").mkdir()
    (code / ".git" / "info" / "exclude").write_text("*.log\n")
    (code / "a.log").touch()
    assert recorded(tmp_path / "runs" / "a", code / "agents") == git(code, "rev-parse", "HEAD")
    (code / "b.py").touch()
    assert " with untracked files" in recorded(tmp_path / "runs" / "b", code / "agents")


def test_runs_beside_the_code_hide_no_changes(code: Path) -> None:
    (code / "new.py").touch()
    assert " with untracked files" in recorded(code / "run", code)


def test_without_an_answer_of_git_the_commit_is_unknown_and_the_reason_is_recorded(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert recorded(tmp_path / "a", tmp_path).startswith("unknown: fatal: not a git repository")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert recorded(tmp_path / "b", code).startswith("unknown: fatal: detected dubious ownership")
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    head = git(code, "rev-parse", "HEAD")
    (code / ".git" / "index").write_bytes(b"damaged")
    assert recorded(tmp_path / "c", code).startswith(f"{head}, changes unknown: ")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert recorded(tmp_path / "d", code).startswith("unknown: git is not installed (files ")


@pytest.mark.parametrize("has_git", [True, False])
def test_changed_code_is_found_with_and_without_git(
    has_git: bool, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code / "agent.py").write_text("a = 2\n")
    (code / "prompt.txt").write_text("Answer.")
    if not has_git:
        monkeypatch.setenv("PATH", str(tmp_path))
    run = code / "runs" / "a"
    assert not recorded(run, code).endswith("changes")
    assert not commit_changed(run, code)
    (run / "store.db").touch()
    (code / "__pycache__").mkdir()
    (code / "__pycache__" / "agent.pyc").touch()
    (code / "train.log").write_text("step 1/16")
    assert not commit_changed(run, code), "neither the folder of the runs nor compiled code nor output counts"
    since = (run / "commit.txt").stat().st_mtime_ns
    later = since + 10**9
    for file in code.rglob("*"):
        os.utime(file, ns=(since, since))
    assert newer_files(run, code) == []
    for name in ("agent.py", "prompt.txt"):
        before = (code / name).read_text()
        (code / name).write_text("other")
        assert commit_changed(run, code)
        os.utime(code / name, ns=(later, later))
        assert newer_files(run, code) == [code / name]
        (code / name).write_text(before)
        assert not commit_changed(run, code)
        os.utime(code / name, ns=(since, since))
    (code / "agent.py").unlink()
    os.utime(code, ns=(since, since))
    assert newer_files(run, code) == [], "deleted before, as far as its folder tells"
    os.utime(code, ns=(later, later))
    assert newer_files(run, code) == ([code / "agent.py"] if has_git else [])
    (code / "tools.py").touch()
    assert commit_changed(run, code)
    record_commit(run, code, step=1)
    assert not commit_changed(run, code)
    (run / "commit.txt").write_text("unknown: git is not installed\n")
    assert commit_changed(run, code), "of an earlier version"
    assert newer_files(run, code) == [], "the time of the state is not known"


def test_output_that_git_tracks_is_code(code: Path) -> None:
    (code / "expected.out").write_text("1")
    git(code, "add", "expected.out")
    git(code, "commit", "-qm", "second")
    run = code / "runs" / "a"
    recorded(run, code)
    (code / "expected.out").write_text("2")
    (code / "train.out").write_text("step 1")
    assert commit_changed(run, code)


def test_the_target_of_a_link_is_newer(code: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Answer.")
    (code / "prompt.txt").symlink_to(tmp_path / "prompt.txt")
    (code / "gone.txt").touch()
    run = code / "runs" / "a"
    recorded(run, code)
    later = (run / "commit.txt").stat().st_mtime_ns + 10**9
    os.utime(tmp_path / "prompt.txt", ns=(later, later))
    (code / "gone.txt").unlink()
    assert newer_files(run, code) == [code / "prompt.txt"]


def resume(settings: list[str]) -> Path:
    config = load_config({}, [*settings, "run.resume=true"])
    folder, checkpoint = open_run_folder(config)
    assert checkpoint is not None
    record_resume(config, folder, checkpoint)
    return folder


def test_a_resumed_run_lists_every_commit_with_its_first_step(
    code: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(code)
    first = git(code, "rev-parse", "HEAD")
    settings = ["tasks.train=tests.bandit:tasks", "policy.model=m", "run.dir=runs", "run.name=a"]
    folder, _ = open_run_folder(load_config({}, settings))
    make_empty_checkpoint(folder, 20)
    resume(settings)
    assert recorded_commits(folder) == [first]
    assert "has changed" not in caplog.text
    git(code, "commit", "--allow-empty", "-qm", "second")
    second = git(code, "rev-parse", "HEAD")
    resume(settings)
    assert recorded_commits(folder) == [first, f"from step 20: {second}"]
    assert (
        "what is recorded up to step 20, such as held-out rewards before training, is of the earlier code"
        in caplog.text
    )
    caplog.clear()
    (folder / "commit.txt").unlink()
    resume(settings)
    assert recorded_commits(folder) == ["unknown: not recorded", f"from step 20: {second}"]
    assert "has changed" not in caplog.text
