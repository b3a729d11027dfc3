"""The list of runs, and which of them are running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_core.errors import ConfigError
from lightning_core.records.report import MetricsLog, Summary
from lightning_core.records.run_folder.lock import is_running, running
from lightning_core.records.run_folder.remove import started
from lightning_core.records.run_folder.runs import list_runs
from lightning_core.records.store import Store
from tests.records.test_store import record

CONFIG = "policy: {model: tiny}\ntrainer: {steps: 9}\nrun: {tags: [first, demo]}\n"


def make_run(folder: Path, *, age: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    stamp = (folder / "config.yaml").stat().st_mtime - age
    os.utime(folder / "config.yaml", (stamp, stamp))
    return folder


def summary() -> Summary:
    return Summary(eval=None, steps=9, rollouts=1, tokens_sampled=1, tokens_trained=1, wall_seconds=1.0, seed=0)


def test_runs_are_listed_with_state_and_progress_the_newest_first(tmp_path: Path) -> None:
    old, new = make_run(tmp_path / "old", age=100), make_run(tmp_path / "new")
    (tmp_path / "latest").symlink_to("new")
    (tmp_path / "notes").mkdir()
    summary().write(old / "summary.json")
    log = MetricsLog(new / "metrics.jsonl")
    log.append(1, {"reward": 0.25})
    log.append(2, {"reward": 0.5})
    first, second = list_runs(tmp_path)
    assert (first.name, first.state, first.steps, first.total_steps, first.reward) == ("new", "stopped", 2, 9, 0.5)
    assert (first.model, first.tags) == ("tiny", ("first", "demo"))
    assert (second.name, second.state, second.summary) == ("old", "finished", summary())
    assert [line["reward"] for line in first.metrics] == [0.25, 0.5]
    assert [run.name for run in list_runs(new)] == ["new"], "a run's own folder"


def test_a_resumed_run_has_no_results_until_it_is_finished_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    summary().write(folder / "summary.json")
    MetricsLog(folder / "metrics.jsonl").append(9, {"reward": 0.25})
    with running(folder):
        (found,) = list_runs(tmp_path)
    assert (found.state, found.summary) == ("running", None)
    assert [run.state for run in list_runs(tmp_path)] == ["finished"], "it was stopped before a step"
    MetricsLog(folder / "metrics.jsonl", keep_steps=9).append(10, {"reward": 0.5})
    (found,) = list_runs(tmp_path)
    assert (found.state, found.summary) == ("stopped", None)


def test_a_run_without_its_configuration_is_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    MetricsLog(folder / "metrics.jsonl").append(1, {"reward": 0.25})
    (folder / "config.yaml").unlink()
    (found,) = list_runs(tmp_path)
    assert (found.name, found.steps, found.model, found.config) == ("run", 1, None, {})


def test_damaged_files_do_not_hide_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "broken")
    for name in ("config.yaml", "summary.json", "metrics.jsonl"):
        (folder / name).write_text("{[\n")
    (found,) = list_runs(tmp_path)
    assert (found.name, found.state, found.steps, found.model, found.summary) == ("broken", "stopped", 0, None, None)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere' in .*; expected the folder of runs"):
        list_runs(tmp_path / "nowhere")


@pytest.mark.skipif(sys.platform == "win32", reason="no file locks")
def test_a_run_is_running_while_a_process_trains_it_even_if_that_is_killed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    program = (
        "import sys, time, pathlib; from lightning_core.records.run_folder.lock import running\n"
        "with running(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    assert not is_running(folder)
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert is_running(folder)
        assert list_runs(tmp_path)[0].state == "running"
        with pytest.raises(ConfigError, match=f"trained by another process .id {other.pid}."), running(folder):
            pass
        other.kill()
    assert not is_running(folder)
    with running(folder):
        assert is_running(folder)
    shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_that_outlives_a_killed_run_does_not_keep_it_running(tmp_path: Path) -> None:
    """An agent forked it."""
    folder = make_run(tmp_path / "run")
    program = (
        "import os, sys, time, pathlib; from lightning_core.records.run_folder.lock import running\n"
        "with running(pathlib.Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if child: print(child, flush=True)\n"
        "    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert is_running(folder)
            parent.kill()
            parent.wait()
            with running(folder):
                assert is_running(folder)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="no file locks")
def test_a_run_starts_while_others_look_at_it(tmp_path: Path) -> None:
    """Each look holds the lock for a moment."""
    folder = make_run(tmp_path / "run")
    with running(folder):
        pass
    program = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH); print('looking', flush=True); time.sleep(0.3)"
    )
    looking = [sys.executable, "-c", program, str(folder / "running.lock")]
    with subprocess.Popen(looking, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "looking\n"
        with running(folder):
            assert is_running(folder)


@pytest.mark.parametrize("error", [ConfigError, KeyboardInterrupt])
@pytest.mark.parametrize(("written", "kept"), [(None, False), ("store", False), ("rollout", True), ("log.txt", True)])
def test_a_run_that_fails_is_removed_only_if_it_did_nothing(
    tmp_path: Path, error: type[BaseException], written: str | None, kept: bool
) -> None:
    for name in ("earlier", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("policy: {model: m}\n")
    (tmp_path / "latest").symlink_to("new")
    with pytest.raises(error), started(tmp_path / "new"):
        _write(tmp_path / "new", written, error)
    assert (tmp_path / "new").exists() == kept
    assert (tmp_path / "latest").readlink() == Path("new" if kept else "earlier")


def _write(folder: Path, written: str | None, error: type[BaseException]) -> None:
    if written in ("store", "rollout"):
        with Store(folder / "store.db") as store:
            store.add_rollouts([(record("r"), ())] if written == "rollout" else [])
    elif written is not None:
        (folder / written).write_text("of a server")
    raise error("no")
