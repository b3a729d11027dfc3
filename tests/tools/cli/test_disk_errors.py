"""SQLite's errors about the run's store: only those of a full disk are answered with advice about space."""

from __future__ import annotations

import argparse
import sqlite3

import pytest

from lightning_core.tools.cli import main as cli_main


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (sqlite3.SQLITE_FULL, "cannot be written: a disk error. Free space on the disk, or raise the quota"),
        (sqlite3.SQLITE_IOERR_WRITE, "cannot be written: a disk error. Free space on the disk, or raise the quota"),
        (sqlite3.SQLITE_IOERR_SHMSIZE, "cannot be written: a disk error. Free space on the disk, or raise the quota"),
        (sqlite3.SQLITE_IOERR_READ, "cannot be read or written: a disk error. Check the disk and its file system\n"),
    ],
)
def test_an_error_of_the_disk_is_one_line_with_advice_for_its_cause(
    code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        error = sqlite3.OperationalError("a disk error")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(cli_main, "_train", fail)
    assert cli_main.main(["train"]) == 1
    assert capsys.readouterr().err.startswith(f"lightning-rl: the run's store {message}")


def test_an_error_without_a_code_of_sqlite_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise sqlite3.OperationalError("no such table: calls")

    monkeypatch.setattr(cli_main, "_train", fail)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        cli_main.main(["train"])
