"""What a switch records, in a SQLite file: answered calls, feedback, and changes of shares."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self, TextIO

from lightning_core.errors import COUNTED, ConfigError, Repeats, describe, plural
from lightning_core.records.failures import check_writable
from lightning_core.records.run_folder.lock import try_lock
from lightning_core.tools.record.background import BackgroundWork

logger = logging.getLogger(__name__)

FILE = "switch.db"
DISCONNECTED = "the client disconnected"
"""The error of a call whose client did."""
_OF_THE_CLIENT = (400, 404, 413, 415, 422)
"""Statuses of requests that are wrong."""
_DELETE_SECONDS = 3600.0
_LOCKED_SECONDS = 5.0
"""Longest wait for another program that has locked the file, before it is logged and tried again."""
_CLOSE_SECONDS = 30.0
"""Time that waiting entries have at the end."""
_ENTRY_BYTES = 500
_DELETE = (
    "DELETE FROM feedback WHERE call IN (SELECT id FROM calls WHERE began < ?)",
    "DELETE FROM calls WHERE began < ?",
)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    id TEXT PRIMARY KEY, response TEXT, agent TEXT, conversation TEXT, arm TEXT, shadow INTEGER, began REAL, seconds REAL,
    first_byte REAL, status INTEGER, error TEXT, input_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER, model TEXT
);
CREATE INDEX IF NOT EXISTS calls_response ON calls (response);
CREATE INDEX IF NOT EXISTS calls_agent ON calls (agent, arm);
CREATE INDEX IF NOT EXISTS calls_began ON calls (began);
CREATE TABLE IF NOT EXISTS feedback (call TEXT, reward REAL, comment TEXT, at REAL);
CREATE INDEX IF NOT EXISTS feedback_call ON feedback (call);
CREATE TABLE IF NOT EXISTS changes (at REAL, agent TEXT, arms TEXT, why TEXT);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCall:
    """One request to one arm, and its outcome."""

    id: str
    response: str | None
    """The id that the response has in its wire format."""
    agent: str
    """Empty for calls without a name."""
    conversation: str
    arm: str
    shadow: bool
    """Whether its response was not sent to the client."""
    began: float
    """Seconds since 1970."""
    seconds: float
    first_byte: float | None
    """Seconds until the response began."""
    status: int
    """0 without a response."""
    error: str | None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    model: str | None = None

    @property
    def is_failure(self) -> bool:
        """Whether the arm failed, and not the client."""
        return is_failure(self.error, self.status)


def is_failure(error: str | None, status: int) -> bool:
    """Whether an arm failed a call with this error and status: that of a request that is wrong is the client's."""
    return error not in (None, DISCONNECTED) and status not in _OF_THE_CLIENT


class KnownCall(NamedTuple):
    """A call that feedback can be about."""

    id: str
    agent: str
    arm: str
    conversation: str
    response: str | None
    """The id of its response; None if it had none."""


class ShareChange(NamedTuple):
    """A change of the shares of one agent."""

    agent: str
    arms: dict[str, float]
    why: str
    """``file``, ``arms``, ``promote`` or ``rollback``."""


_Entry = tuple[str, tuple[Any, ...]]
"""A statement and its values."""
_COLUMNS = ", ".join(field.name for field in fields(ArmCall))
_PLACES = ", ".join("?" * len(fields(ArmCall)))


class SwitchStore:
    """The record of the switch in ``folder``, written by a thread of its own. A context manager.

    ``days``: calls that began longer ago are deleted, with their feedback; None: none are.
    Raises `ConfigError` if the folder cannot be written, or if another switch uses it.
    """

    def __init__(self, folder: Path, *, days: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
        self.path = folder / FILE
        self._days = days
        self._deleted_at = float("-inf")
        self._failures = Repeats()
        self._ending = False
        self._work: BackgroundWork[_Entry | Callable[[], _Entry | None]] = BackgroundWork(self._write, pause_seconds=0)
        self._lock = _lock(folder / "switch.lock")
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # it has comments and errors
            self._database = _open(self.path)
        except (OSError, sqlite3.Error) as error:
            self._lock.close()
            raise ConfigError(
                f"{str(self.path)!r} cannot be opened as the record of a switch: {error}. Choose another folder"
            ) from None

    def __enter__(self) -> Self:
        self._delete_old()
        self._work.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write what waits, and close."""
        self._ending = True
        if left := self._work.close(_CLOSE_SECONDS, self._database.close):
            logger.warning("%s for %s not written before the end", plural(left, "row"), self.path)
        self._lock.close()

    def call(self, read: Callable[[], ArmCall], size: int) -> None:
        """Record the call that ``read`` returns on the thread, which keeps ``size`` bytes. Does not wait for the disk."""

        def entry() -> _Entry:
            return f"INSERT OR REPLACE INTO calls ({_COLUMNS}) VALUES ({_PLACES})", astuple(read())

        self._put(entry, size)

    def feedback(self, call: str, reward: float, comment: str | None) -> bool:
        """Record feedback about the call with the id ``call``; return False if too much waits to be written."""
        text = None if comment is None else comment.encode("utf-8", "replace").decode()
        entry = ("INSERT INTO feedback VALUES (?, ?, ?, ?)", (call, reward, text, time.time()))
        return self._put(entry, len(text or ""))

    def change(self, change: ShareChange) -> None:
        """Record the shares of an agent from now on."""
        values = (time.time(), change.agent, json.dumps(change.arms), change.why)
        self._put(("INSERT INTO changes VALUES (?, ?, ?, ?)", values))

    def keep(self, days: int | None) -> None:
        """Delete old calls by ``days`` from now on."""

        def keep() -> None:  # on the thread that reads it
            self._days, self._deleted_at = days, float("-inf")

        self._put(keep)

    def find(self, response: str) -> list[KnownCall]:
        """The call with this id; otherwise those whose responses have it, at most two. Calls that answered come first."""
        with closing(_open(self.path)) as database:
            rows = database.execute(
                "SELECT id, agent, arm, conversation, response FROM calls WHERE id = ?1 OR response = ?1 ORDER BY id != ?1, shadow LIMIT 2",
                (response,),
            ).fetchall()
        calls = [KnownCall(*row) for row in rows]
        return calls[:1] if calls and calls[0].id == response else calls

    def changes(self) -> list[ShareChange]:
        """All changes of shares, oldest first."""
        with closing(_open(self.path)) as database:
            rows = database.execute("SELECT agent, arms, why FROM changes ORDER BY rowid").fetchall()
        return [ShareChange(agent, json.loads(arms), why) for agent, arms, why in rows]

    def _put(self, entry: _Entry | Callable[[], _Entry | None], size: int = 0) -> bool:
        accepted = self._work.put(entry, size + _ENTRY_BYTES)
        if not accepted:
            self._lose("too many wait to be written")
        return accepted

    def _write(self, entries: Sequence[_Entry | Callable[[], _Entry | None]]) -> None:
        rows = [row for entry in entries if (row := self._read(entry)) is not None]
        try:
            self._store(rows)
        except Exception as error:  # noqa: BLE001 - of one row; the others are kept
            if _is_locked(error):
                self._lose(describe(error), times=len(rows))
                rows.clear()
            for row in rows:
                try:
                    self._store([row])
                except Exception as error:  # noqa: BLE001 - such as a full disk
                    self._lose(describe(error))
        self._delete_old()

    def _read(self, entry: _Entry | Callable[[], _Entry | None]) -> _Entry | None:
        try:
            return entry() if callable(entry) else entry
        except Exception as error:  # noqa: BLE001 - a response may have any content
            self._lose(describe(error))
            return None

    def _delete_old(self) -> None:
        """Delete the calls that are too old, once an hour, and log how many."""
        if self._days is None or time.monotonic() - self._deleted_at < _DELETE_SECONDS:
            return
        self._deleted_at = time.monotonic()
        try:
            oldest = time.time() - self._days * 86_400
            with self._database:
                feedback, calls = (self._database.execute(text, (oldest,)).rowcount for text in _DELETE)
        except Exception as error:  # noqa: BLE001 - else the thread would end, and nothing be recorded
            logger.warning("old calls cannot be deleted from %s: %s", self.path, describe(error))
        else:
            if calls:
                text = "deleted %s older than %s (keep_days), and %s of them"
                logger.info(text, plural(calls, "call"), plural(self._days, "day"), plural(feedback, "reward"))

    def _store(self, rows: Sequence[_Entry]) -> None:
        while True:
            try:
                with self._database:
                    for statement, values in rows:
                        self._database.execute(statement, values)
                return
            except sqlite3.OperationalError as error:
                if self._ending or not _is_locked(error):
                    raise
                if (times := self._failures.count("locked")) is not None:
                    text = "%s is locked by another program%s; waiting: %s"
                    logger.warning(text, self.path, times, plural(len(rows), "row"), extra=COUNTED)

    def _lose(self, reason: str, times: int = 1) -> None:
        if (text := self._failures.count(reason, times)) is not None:
            logger.warning("a row of %s was lost%s: %s", self.path, text, reason, extra=COUNTED)


def _is_locked(error: Exception) -> bool:
    if not isinstance(error, sqlite3.OperationalError):
        return False
    code = error.sqlite_errorcode & 0xFF  # the rest is a detail
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _lock(path: Path) -> TextIO:
    """A file that is locked as long as it is open. Raises `ConfigError` if another process has it."""
    file = path.open("a")
    if try_lock(file):
        return file
    file.close()
    raise ConfigError(
        f"another switch uses the folder {str(path.parent)!r}: stop it, or set another one with `folder` in the plan"
    )


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False, timeout=_LOCKED_SECONDS)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.executescript(_SCHEMA)
    return database
