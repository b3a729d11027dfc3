"""Exports on full disks, in wrong places, killed, and with the permissions of the umask."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_core.records.run_folder.checkpoints import checkpoints
from lightning_core.tools.cli.main import main
from tests import warm
from tests.tools.export.runs import FEW, train

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from lightning_core.tools.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""A program in which files of more than some bytes cannot be written."""
SLOW = """
import sys, time
from lightning_core.tools.cli.main import main
from lightning_core.tools.export import export
def wait(*_: object, **__: object) -> str:
    print("writing", flush=True)
    for _ in range(600):  # a signal just before a sleep does not end it
        time.sleep(0.1)
    return ""
export.make_card = wait
sys.exit(main(sys.argv[1:]))
"""
"""A program that waits when the weights are written."""


def limited(size: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # Python would cut the bytecode of its modules at the limit too, and every later program would fail to load it.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return warm.run(["-c", LIMITED, str(size), *map(str, arguments)], env=env)


def kill_export(run: Path, out: Path, number: int) -> tuple[int, str]:
    """The exit code and the messages of an export that gets the signal ``number`` when its weights are written."""
    with warm.Warm(["-c", SLOW, "export", str(run), str(out)]) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(number)
        return process.wait(timeout=30), process.errors()


@pytest.mark.parametrize("size", [100, 100_000], ids=["the configuration", "the weights"])
def test_a_full_disk_is_one_line_and_leaves_nothing(run: Callable[[str], Path], tmp_path: Path, size: int) -> None:
    """safetensors and tokenizers have errors of their own for it."""
    done = limited(size, "export", run("full"), tmp_path / "out")
    expected = (
        f"lightning-rl: File too large ('{tmp_path}/out'). Free space on the disk, or raise the quota or the limit"
    )
    assert (done.returncode, done.stderr) == (1, f"{expected} on the size of files.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "found"), [(1000, "File too large"), (100_000, "the run's store '.*' cannot be written: ")]
)
def test_training_on_a_full_disk_ends_with_one_line(
    run: Callable[[str], Path], tmp_path: Path, size: int, found: str
) -> None:
    settings = [f"run.dir={tmp_path}", "agent=tests.bandit:solve", "rollouts.executor=task"]
    done = limited(size, "train", run("full") / "config.yaml", *settings)
    assert done.returncode == 1
    assert re.match(f"lightning-rl: {found}", done.stderr.splitlines()[-1])
    assert "Free space on the disk" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_places_that_cannot_be_written_are_refused(
    run: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, missing = run("full"), "/proc/missing/x"
    settings = [str(folder / "config.yaml"), f"run.dir={missing}", "agent=tests.bandit:solve"]
    held_out = "tasks.eval=tests.bandit:held_out"
    (tmp_path / "link").symlink_to(folder)
    for message, arguments in {
        f"cannot export to '{missing}': No such file or directory ('/proc/missing')": ["export", str(folder), missing],
        "cannot create the run's folder: No such file or directory ('/proc/missing')": ["train", *settings],
        "is inside the run's folder": ["export", str(tmp_path / "link"), str(folder / "inside")],
        "File name too long": ["export", str(folder), str(tmp_path / ("x" * 300))],
    }.items():
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert main(["eval", *settings, held_out]) == 2
    assert "cannot create the run's folder" in capsys.readouterr().err
    assert not (folder / "inside").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_ended_leaves_nothing(run: Callable[[str], Path], tmp_path: Path, number: int) -> None:
    code, messages = kill_export(run("full"), tmp_path / "out", number)
    assert code == 128 + number
    assert f"lightning-rl: interrupted by {signal.Signals(number).name}" in messages
    assert list(tmp_path.iterdir()) == []


def test_the_next_export_removes_the_folder_of_a_killed_one_but_not_of_a_live_one(
    run: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_export(run("full"), out, signal.SIGKILL)
    (left,) = tmp_path.iterdir()
    assert (left / "model.safetensors").exists()
    (tmp_path / ".out-settings").mkdir()
    with warm.Warm(["-c", SLOW, "export", str(run("full")), str(out)]) as live:
        assert live.stdout.readline() == "writing\n"
        assert not left.exists()
        assert main(["export", str(run("full")), str(out)]) == 0
        assert len([path for path in tmp_path.iterdir() if path.suffix == ".partial"]) == 1
        live.terminate()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out-settings", "out"]


def test_the_umask_decides_who_may_read_exports_and_checkpoints(base: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run = train(tmp_path, base, policy={"tuning": "lora"}, **FEW)
        assert main(["export", str(run), str(tmp_path / "hf")]) == 0
        assert main(["export", str(run), str(tmp_path / "peft"), "--format", "peft"]) == 0
    finally:
        os.umask(before)
    for folder in (*checkpoints(run), tmp_path / "hf", tmp_path / "peft"):
        for path in (folder, *folder.rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def test_an_export_shows_no_progress_bar_in_a_pipe(run: Callable[[str], Path], tmp_path: Path) -> None:
    done = warm.run(["-m", "lightning_core.tools.cli", "export", str(run("full")), str(tmp_path / "out")])
    assert (done.returncode, done.stderr) == (0, "")
