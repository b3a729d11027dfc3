"""Checkpoints that cannot be read or that a resumed run passed over, ids of runs, and files that are written as a whole."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from lightning_core.errors import ConfigError
from lightning_core.records.atomic import link_atomically, write_atomically
from lightning_core.records.run_folder.checkpoints import checkpoints, newest_sound, set_aside_newer
from lightning_core.records.run_folder.manifest import MANIFEST, RUN_ID, write_manifest, write_run_id


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an id and the checkpoints 1 to 3."""
    write_run_id(tmp_path)
    for step in (1, 2, 3):
        save(tmp_path, step)
    return tmp_path


def save(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_text(str(step))
    write_manifest(folder, step=step, run=run)


def unreadable(file: Path) -> None:
    """Make reads of ``file`` fail, for root too."""
    length = file.stat().st_size
    file.unlink()
    file.symlink_to("/proc/self/mem")  # reads of its first bytes are errors of the disk (EIO)
    checked = file.parent / MANIFEST
    facts = json.loads(checked.read_text())
    assert facts["files"][file.name]["bytes"] == length
    facts["files"][file.name]["bytes"] = 0
    checked.write_text(json.dumps(facts))


def test_a_checkpoint_that_cannot_be_read_is_passed_over(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    unreadable(run / "checkpoints" / "step-000003" / "weights")
    assert newest_sound(run, training=False) == run / "checkpoints" / "step-000002"
    assert "it cannot be read: Input/output error" in caplog.text
    assert "weights" in caplog.text


def test_checkpoints_that_a_live_run_replaces_are_not_missed(run: Path) -> None:
    file = run / "checkpoints" / "step-000003" / MANIFEST
    file.unlink()
    os.mkfifo(file)  # it is read while the run goes on

    def replace() -> None:
        with file.open("w") as pipe:
            for old in checkpoints(run):
                shutil.rmtree(old)
            save(run, 4)
            pipe.write("{")

    thread = threading.Thread(target=replace)
    thread.start()
    assert newest_sound(run, training=False) == run / "checkpoints" / "step-000004"
    thread.join()


def test_only_the_newest_checkpoint_that_was_passed_over_is_kept(run: Path) -> None:
    parent = run / "checkpoints"
    (parent / "step-000007.bak").mkdir()
    set_aside_newer(run, parent / "step-000001")
    assert sorted(path.name for path in parent.iterdir()) == ["step-000001", "step-000003.unused", "step-000007.bak"]
    save(run, 3)
    set_aside_newer(run, parent / "step-000003")
    assert (parent / "step-000003.unused").exists(), "nothing was passed over"
    set_aside_newer(run, None)
    assert sorted(path.name for path in parent.iterdir()) == ["step-000003.unused", "step-000007.bak"]


@pytest.mark.parametrize("text", [None, "", "\n"])
def test_a_missing_or_empty_id_is_written_again(run: Path, text: str | None) -> None:
    own = (run / RUN_ID).read_text()
    (run / RUN_ID).unlink() if text is None else (run / RUN_ID).write_text(text)
    write_run_id(run)
    assert (run / RUN_ID).read_text() == own, "that of its checkpoints"
    for path in checkpoints(run):
        facts = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps({**facts, "run": "another"}))
    with pytest.raises(ConfigError, match="another run wrote it"):
        newest_sound(run, training=False)


def test_files_and_links_are_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for text in ("a", "b"):
        write_atomically(tmp_path / "file", text, times=(1, 2))
        link_atomically(tmp_path / "link", text)
    assert (tmp_path / "file").read_text() == "b"
    assert (tmp_path / "file").stat().st_mtime_ns == 2
    assert str((tmp_path / "link").readlink()) == "b"
    assert len(list(tmp_path.iterdir())) == 2
