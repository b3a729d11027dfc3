"""What a switch records, in a SQLite file: answered calls, feedback, and changes of shares."""

from __future__ import annotations

import json
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from lightning_core.errors import COUNTED, ConfigError, Repeats, describe
from lightning_core.records.failures import check_writable

logger = logging.getLogger(__name__)

FILE = "switch.db"
_MOST_AT_ONCE = 1000
"""Rows of one transaction."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    id TEXT PRIMARY KEY, response TEXT, agent TEXT, conversation TEXT, arm TEXT, shadow INTEGER, began REAL, seconds REAL,
    first_byte REAL, status INTEGER, error TEXT, input_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER, model TEXT
);
CREATE INDEX IF NOT EXISTS calls_response ON calls (response);
CREATE INDEX IF NOT EXISTS calls_agent ON calls (agent, arm);
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


class KnownCall(NamedTuple):
    """A call that feedback can be about."""

    id: str
    agent: str
    arm: str
    response: str | None
    """The id of its response; None if it had none."""


_COLUMNS = ", ".join(field.name for field in fields(ArmCall))
_PLACES = ", ".join("?" * len(fields(ArmCall)))


class Book:
    """The record of the switch in ``folder``, written by a thread of its own. A context manager.

    Raises `ConfigError` if the folder cannot be written, or if another switch uses it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
        self.path = folder / FILE
        self._entries: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | Future[None] | None] = queue.SimpleQueue()
        self._failures = Repeats()
        try:
            self._database = _open(self.path)
        except sqlite3.Error as error:
            raise ConfigError(
                f"{str(self.path)!r} cannot be opened as the record of a switch: {error}. Choose another folder, or stop the switch "
                "that uses it"
            ) from None
        self._thread = threading.Thread(target=self._write, name="lightning-switch-book", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._entries.put(None)
        self._thread.join()
        self._database.close()

    def call(self, call: ArmCall) -> None:
        """Record a call. Does not wait for the disk."""
        self._entries.put((f"INSERT OR REPLACE INTO calls ({_COLUMNS}) VALUES ({_PLACES})", astuple(call)))

    def feedback(self, call: str, reward: float, comment: str | None) -> None:
        """Record feedback about the call with the id ``call``."""
        self._entries.put(("INSERT INTO feedback VALUES (?, ?, ?, ?)", (call, reward, comment, time.time())))

    def change(self, agent: str, arms: Mapping[str, float], why: str) -> None:
        """Record the shares of ``agent`` from now on."""
        self._entries.put(
            ("INSERT INTO changes VALUES (?, ?, ?, ?)", (time.time(), agent, json.dumps(dict(arms)), why))
        )

    def flush(self) -> None:
        """Wait until everything so far is in the file."""
        done: Future[None] = Future()
        self._entries.put(done)
        done.result(timeout=60)

    def find(self, response: str) -> KnownCall | None:
        """The call with this id, or whose response has it; None if there is none."""
        with closing(_open(self.path)) as database:
            row = database.execute(
                "SELECT id, agent, arm, response FROM calls WHERE id = ? OR response = ? ORDER BY shadow LIMIT 1",
                (response, response),
            ).fetchone()
        return None if row is None else KnownCall(*row)

    def latest_shares(self, why: str | None = None) -> dict[str, dict[str, float]]:
        """The shares of each agent after its last change, of those for the reason ``why`` if it is given."""
        with closing(_open(self.path)) as database:
            rows = database.execute(
                "SELECT agent, arms FROM changes WHERE why = ? OR ? IS NULL ORDER BY rowid", (why, why)
            ).fetchall()
        return {agent: json.loads(arms) for agent, arms in rows}

    def previous_shares(self, agent: str, current: Mapping[str, float]) -> dict[str, float] | None:
        """The last shares of ``agent`` that differ from ``current``; None if there were no others."""
        with closing(_open(self.path)) as database:
            rows = database.execute("SELECT arms FROM changes WHERE agent = ? ORDER BY rowid DESC", (agent,)).fetchall()
        return next((arms for (text,) in rows if (arms := json.loads(text)) != dict(current)), None)

    def _write(self) -> None:
        ended = False
        while not ended:
            entries = [self._entries.get()]
            while len(entries) < _MOST_AT_ONCE and not self._entries.empty():
                entries.append(self._entries.get())
            ended = None in entries
            self._store([entry for entry in entries if isinstance(entry, tuple)])
            for entry in entries:
                if isinstance(entry, Future):
                    entry.set_result(None)

    def _store(self, batch: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """Write ``batch`` in one transaction; a failure, such as a full disk, loses it and is logged."""
        try:
            with self._database:
                for statement, values in batch:
                    self._database.execute(statement, values)
        except sqlite3.Error as error:
            if (times := self._failures.count(str(error))) is not None:
                logger.warning(
                    "%d entries of %s were lost%s: %s", len(batch), self.path, times, describe(error), extra=COUNTED
                )


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False, timeout=30.0)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.executescript(_SCHEMA)
    return database
