"""The border of the commands: any exception is a message with a documented exit code."""

from __future__ import annotations

import argparse
import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from docs._generate.exits import update
from lightning_core.errors import InfrastructureError, RecordError
from lightning_core.model.out_of_memory import is_out_of_memory
from lightning_core.records.failures import StoreErrors, failure_of
from lightning_core.tools.cli import main as cli_main

DOCS = Path(__file__).parents[3] / "docs"


def wrapped(code: int, text: str) -> RecordError:
    """The error that a store raises for one of SQLite."""
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    with pytest.raises(RecordError) as caught, StoreErrors(Path("runs/x/store.db")):
        raise error
    return caught.value


def divide() -> float:
    return 1 / 0


def bug() -> Exception:
    try:
        divide()
    except ZeroDivisionError as error:
        return error
    raise AssertionError


ERRORS = {
    "disk full": (OSError(errno.ENOSPC, "No space left", "x.json"), 1, "No space left ('x.json'). Free space on the disk"),
    "read-only": (OSError(errno.EROFS, "Read-only file system", "x"), 1, "('x'). The file system is read-only: mount it"),
    "permission": (PermissionError(errno.EACCES, "Permission denied", "x"), 1, "('x'). Change the permissions"),
    "files": (OSError(errno.EMFILE, "Too many open files"), 1, "Too many open files. Raise the limit on open files (ulimit -n)"),
    "memory": (MemoryError(), 1, "out of memory: MemoryError. Free memory"),
    "torch's memory": (
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried"),
        1,
        "out of memory: [enforce fail",
    ),
    "threads": (RuntimeError("can't start new thread"), 1, "no further thread can be started. Raise the limit on processes"),
    "package": (ModuleNotFoundError("No module named 'x'", name="x"), 2, "the package 'x' is not installed"),
    "ours": (InfrastructureError("the endpoint died"), 1, "InfrastructureError: the endpoint died\n"),
    "a group": (ExceptionGroup("tasks", [OSError(errno.EIO, "I/O error", "x")]), 1, "I/O error ('x'). Check the disk"),
    "store full": (wrapped(sqlite3.SQLITE_FULL, "disk full"), 1, "store 'runs/x/store.db' cannot be written: disk full. Free space"),
    "store size": (wrapped(sqlite3.SQLITE_IOERR_SHMSIZE, "disk I/O"), 1, "cannot be written: disk I/O. Free space on the disk"),
    "store disk": (wrapped(sqlite3.SQLITE_IOERR_READ, "disk I/O"), 1, "cannot be read or written: disk I/O. Check the disk"),
    "store locked": (wrapped(sqlite3.SQLITE_BUSY, "locked"), 1, "is locked by another process: locked. Stop the program"),
    "store damaged": (wrapped(sqlite3.SQLITE_CORRUPT, "malformed"), 1, "is damaged: malformed. Restore the file"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "interrupted."),
    "a bug": (bug(), 70, "unexpected ZeroDivisionError: division by zero"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_an_exception_is_a_message_with_an_exit_code(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error, code, message = ERRORS[name]

    def fail(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(cli_main, "_train", fail)
    assert cli_main.main(["train"]) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
        ),
        RuntimeError(
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
        ),
        RuntimeError("unable to mmap 269060552 bytes from file </model.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=str,
)
def test_memory_that_cannot_be_allocated_is_a_failure_of_the_machine(error: Exception) -> None:
    failure = failure_of(error)
    assert is_out_of_memory(error)
    assert failure is not None
    assert failure.advice.startswith("Free memory")


def test_the_traceback_of_a_bug_is_in_the_runs_folder_and_shown_with_debug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: argparse.Namespace) -> int:
        options.folder = tmp_path
        error = ValueError("of https://user:password@host")
        error.add_note("The last checkpoint is step-000010.")
        raise error

    monkeypatch.setattr(cli_main, "_train", fail)
    monkeypatch.setenv("LIGHTNING_DEBUG", "")
    assert cli_main.main(["train"]) == 70
    shown = capsys.readouterr().err
    (file,) = tmp_path.glob("error-*.txt")
    assert f"The traceback is in {file}" in shown
    assert shown.endswith(" The last checkpoint is step-000010.\n")
    assert "test_border.py" in shown, "the line of the code that raised"
    assert 'test_border.py", line' in file.read_text()
    assert "password" not in shown + file.read_text()
    assert cli_main.main(["train", "--debug"]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_pipe_that_is_not_standard_output_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(cli_main, "_train", fail)
    assert cli_main.main(["train"]) == 1
    assert "Broken pipe. Remove the cause" in capfd.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as pipe:
        command = [sys.executable, "-m", "lightning_core.tools.cli", "completion", "bash"]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (128 + 13, b""), "as with SIGPIPE"


@pytest.mark.parametrize(("returned", "code"), [("3", 3), ("0", 0), ("raise_pipe()", 141), ("raise_folder()", 141)])
def test_a_reader_that_has_gone_hides_no_exit_code(returned: str, code: int, tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as pipe:
        done = border(tmp_path, returned, stdout=pipe)
    assert done.returncode == code
    assert ("reader of standard output" in done.stderr) == (returned == "raise_folder()"), "a run says why it ended"


def test_without_standard_output_a_broken_pipe_is_an_error(tmp_path: Path) -> None:
    done = border(tmp_path, "raise_pipe()", preexec_fn=lambda: os.close(1))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "Broken pipe. Remove the cause" in done.stderr


def test_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = border(tmp_path, "0", stdout=full)
    assert done.returncode == 1
    assert "No space left on device. Free space" in done.stderr


BORDER = """
import argparse, pathlib, sys
from lightning_core.tools.cli.border import run_command
options = argparse.Namespace(debug=False, folder=None, command="train")
def raise_pipe():
    raise BrokenPipeError(32, "Broken pipe")
def raise_folder():
    options.folder = pathlib.Path(sys.argv[1])
    raise_pipe()
def command(_):
    print("a table")
    return {returned}
sys.exit(run_command(command, options))
"""


def border(
    folder: Path, returned: str, *, stdout: IO[bytes] | None = None, preexec_fn: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that prints a line and returns the expression ``returned``."""
    return subprocess.run(
        [sys.executable, "-c", BORDER.replace("{returned}", returned), str(folder)],
        stdout=stdout, stderr=subprocess.PIPE, preexec_fn=preexec_fn, text=True, check=False,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": ""},
    )  # fmt: skip


def test_an_error_of_the_system_in_the_users_code_has_its_lines_and_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: argparse.Namespace) -> int:
        options.folder = tmp_path
        Path("answers.json").read_text()
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_main, "_train", fail)
    assert cli_main.main(["train"]) == 1
    shown = capsys.readouterr().err
    (file,) = tmp_path.glob("error-*.txt")
    assert "No such file or directory ('answers.json')" in shown
    assert "test_border.py:" in shown
    assert 'Path("answers.json").read_text()' in shown
    assert f"The traceback is in {file}" in shown
    assert "FileNotFoundError" in file.read_text()


def test_all_errors_of_a_group_are_named_and_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: argparse.Namespace) -> int:
        options.folder = tmp_path
        raise ExceptionGroup("tasks", [OSError(errno.EIO, "I/O error", "x"), KeyError("reward")])

    monkeypatch.setattr(cli_main, "_train", fail)
    assert cli_main.main(["train"]) == 1
    assert "Further errors: KeyError: 'reward'." in capsys.readouterr().err
    (file,) = tmp_path.glob("error-*.txt")
    assert "KeyError: 'reward'" in file.read_text()


def test_the_page_has_the_exit_codes() -> None:
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert update(text) == text, "run: python -m docs._generate.exits docs/command-line.md"
