"""The durable record of a run: rollouts, their spans, the credit of their calls, steps. One SQLite file.

What a method has written when it returns survives a crash of the process and of the machine. Only the trainer's process writes;
other processes may read meanwhile (``read_only``), which is what SQLite's write-ahead log is for. All methods are thread-safe.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from lightning_core.errors import ConfigError
from lightning_core.trace import AGENT, OPERATION, OUTPUT_IDS, SpanRecord, Trace, spans_to_trace

Phase = Literal["train", "eval_before", "eval", "eval_after", "judge"]
Status = Literal["ok", "failed", "infrastructure"]

_VERSION = 1
_SCHEMA = """
CREATE TABLE rollouts (
    ordinal INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, step INTEGER NOT NULL, task_id TEXT NOT NULL, phase TEXT NOT NULL,
    attempt INTEGER NOT NULL, status TEXT NOT NULL, reward REAL, error TEXT, version INTEGER,
    started_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL, calls INTEGER NOT NULL, counters TEXT NOT NULL
);
CREATE TABLE spans (
    rollout TEXT NOT NULL REFERENCES rollouts(id) ON DELETE CASCADE, span_id TEXT NOT NULL, parent_id TEXT, name TEXT NOT NULL,
    start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, error TEXT, operation TEXT, agent TEXT, attributes TEXT NOT NULL,
    PRIMARY KEY (rollout, span_id)
) WITHOUT ROWID;
-- Attributes that are bytes: token ids and logprobs.
CREATE TABLE arrays (
    rollout TEXT NOT NULL, span_id TEXT NOT NULL, key TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (rollout, span_id, key),
    FOREIGN KEY (rollout, span_id) REFERENCES spans(rollout, span_id) ON DELETE CASCADE
) WITHOUT ROWID;
CREATE TABLE credit (
    rollout TEXT NOT NULL REFERENCES rollouts(id) ON DELETE CASCADE, call TEXT NOT NULL, agent TEXT NOT NULL,
    step INTEGER NOT NULL, reward REAL NOT NULL, advantage REAL NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (rollout, call)
) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, metrics TEXT NOT NULL);
CREATE INDEX rollouts_by_step ON rollouts (phase, step);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One attempt at one task."""

    id: str
    """The trace's id: 32 hexadecimal digits."""
    step: int
    """Training steps that had been taken when it started: 0 for the rollouts that the first update is made from."""
    task_id: str
    phase: Phase
    attempt: int
    """0, or how many earlier tries failed for reasons of infrastructure."""
    status: Status
    """``failed``: the agent raised; ``infrastructure``: it is not the agent's fault and does not count."""
    reward: float | None
    error: str | None
    version: int | None
    """The policy version that it started with; None where no policy of ours took part, or several with versions of their own."""
    started_ns: int
    ended_ns: int
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """What could not be recorded, by kind."""
    ordinal: int = 0
    """Its number in the store, from 1. Given by the store."""
    calls: int = 0
    """Model calls among its spans. Counted by the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCredit:
    """What one call was credited with in training."""

    rollout: str
    call: str
    agent: str
    step: int
    reward: float
    advantage: float
    tokens: int
    """Sampled tokens of this call that went into the loss."""


class Store:
    """``Store(path)`` opens or makes the file; ``read_only`` refuses to make or change it. A context manager.

    Raises `ConfigError` when there is no file to read, or when it is not a store of this version.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self.path = Path(path)
        if read_only and not self.path.is_file():
            raise ConfigError(f"no record of a run at {str(self.path)!r}; expected the store.db of a run's folder")
        if not read_only:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        uri = f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        self._lock = threading.RLock()
        self._db = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None, timeout=30)
        try:
            self._prepare(read_only)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ConfigError(f"{str(self.path)!r} cannot be used as a run's store: {error}") from error
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, read_only: bool) -> None:
        self._db.execute("PRAGMA foreign_keys = ON")
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            # FULL: a commit waits for the disk; NORMAL would lose the last ones with the machine's power.
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if tables == 0:
                    for statement in _SCHEMA.split(";\n"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {_VERSION}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != _VERSION:
            raise ConfigError(
                f"{str(self.path)!r} has layout {version}, expected {_VERSION}: it is no store, or one of another lightning-rl"
            )

    @contextmanager
    def _transaction(self) -> Generator[None]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise

    def add_rollout(self, record: RolloutRecord, spans: Iterable[SpanRecord]) -> int:
        """Write one rollout with all its spans, or nothing of it; the ordinal that it got.

        Raises ValueError if a span belongs to another rollout or the rollout is there already.
        """
        return self.add_rollouts([(record, spans)])[0]

    def add_rollouts(self, rollouts: Iterable[tuple[RolloutRecord, Iterable[SpanRecord]]]) -> list[int]:
        """`add_rollout` of several, all or nothing, for the price of one wait for the disk."""
        with self._transaction():
            return [self._add_rollout(record, spans) for record, spans in rollouts]

    def _add_rollout(self, r: RolloutRecord, spans: Iterable[SpanRecord]) -> int:
        spans = {span.span_id: span for span in spans}.values()
        foreign = next((span for span in spans if span.trace_id != r.id), None)
        if foreign is not None:
            raise ValueError(f"span {foreign.span_id} belongs to rollout {foreign.trace_id}, expected {r.id}")
        calls = sum(span.attributes.get(OPERATION) == "chat" for span in spans)
        row = (
            r.id,
            r.step,
            r.task_id,
            r.phase,
            r.attempt,
            r.status,
            r.reward,
            r.error,
            r.version,
            r.started_ns,
            r.ended_ns,
        )
        try:
            cursor = self._db.execute(
                "INSERT INTO rollouts VALUES (NULL, ?,?,?,?,?,?,?,?,?,?,?, ?,?)",
                (*row, calls, json.dumps(dict(r.counters))),
            )
        except sqlite3.IntegrityError as error:
            raise ValueError(f"rollout {r.id} cannot be stored: {error}") from error
        for span in spans:
            self._add_span(span)
        return int(cursor.lastrowid or 0)

    def _add_span(self, span: SpanRecord) -> None:
        plain = {k: v for k, v in span.attributes.items() if not isinstance(v, bytes)}
        arrays = [(span.trace_id, span.span_id, k, v) for k, v in span.attributes.items() if isinstance(v, bytes)]
        identity = (span.trace_id, span.span_id, span.parent_id, span.name, span.start_ns, span.end_ns, span.error)
        self._db.execute(
            "INSERT INTO spans VALUES (?,?,?,?,?,?,?, ?,?,?)",
            (*identity, plain.get(OPERATION), plain.get(AGENT), json.dumps(plain, ensure_ascii=False)),
        )
        self._db.executemany("INSERT INTO arrays VALUES (?,?,?,?)", arrays)

    def add_spans(self, spans: Iterable[SpanRecord]) -> None:
        """Write further spans of rollouts that are stored: what was found out about them afterwards."""
        with self._transaction():
            for span in spans:
                self._add_span(span)

    def add_credit(self, rows: Iterable[CallCredit]) -> None:
        """Write the credit of calls whose rollouts are stored; of a call that has some, it takes the place."""
        values = [(r.rollout, r.call, r.agent, r.step, r.reward, r.advantage, r.tokens) for r in rows]
        with self._transaction():
            try:
                self._db.executemany("INSERT OR REPLACE INTO credit VALUES (?,?,?,?,?,?,?)", values)
            except sqlite3.IntegrityError as error:
                raise ValueError(
                    f"credit for a rollout that is not stored, or a number that is none: {error}"
                ) from error

    def add_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step's metrics; they take the place of those that the step had."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?)", (step, json.dumps(dict(metrics))))

    def rewind(self, step: int) -> None:
        """Forget what a run that is resumed after ``step`` updates will do again."""
        again = "(phase = 'train' AND step >= ?) OR (phase <> 'train' AND step > ?) OR phase = 'eval_after'"
        with self._transaction():
            self._db.execute(f"DELETE FROM rollouts WHERE {again}", (step, step))
            self._db.execute("DELETE FROM steps WHERE step > ?", (step,))

    def rollouts(
        self, *, phase: Phase | None = None, step: int | None = None, status: Status | None = None
    ) -> list[RolloutRecord]:
        """Rollouts in the order in which they were stored, all or those that match."""
        wanted = {"phase": phase, "step": step, "status": status}
        given = {key: value for key, value in wanted.items() if value is not None}
        where = " AND ".join(f"{key} = ?" for key in given) or "1"
        return [
            _record(row)
            for row in self._rows(f"SELECT * FROM rollouts WHERE {where} ORDER BY ordinal", *given.values())
        ]

    def rollout(self, which: str | int) -> RolloutRecord:
        """One rollout by its id or ordinal. Raises LookupError if there is none."""
        key = "ordinal" if isinstance(which, int) else "id"
        rows = self._rows(f"SELECT * FROM rollouts WHERE {key} = ?", which)
        if not rows:
            ((count,),) = self._rows("SELECT count(*) FROM rollouts")
            raise LookupError(f"no rollout with {key} {which!r}; the store has {count}, numbered from 1")
        return _record(rows[0])

    def spans(self, which: str | int) -> tuple[SpanRecord, ...]:
        """The spans of one rollout, in order of start."""
        rollout = self.rollout(which).id
        arrays: dict[str, dict[str, bytes]] = {}
        for span_id, key, data in self._rows("SELECT span_id, key, data FROM arrays WHERE rollout = ?", rollout):
            arrays.setdefault(span_id, {})[key] = data
        columns = "span_id, parent_id, name, start_ns, end_ns, error, attributes"
        rows = self._rows(f"SELECT {columns} FROM spans WHERE rollout = ? ORDER BY start_ns, span_id", rollout)
        return tuple(
            SpanRecord(
                trace_id=rollout,
                span_id=span_id,
                parent_id=parent,
                name=name,
                start_ns=start,
                end_ns=end,
                error=error,
                attributes=_attributes(text) | arrays.get(span_id, {}),
            )
            for span_id, parent, name, start, end, error, text in rows
        )

    def trace(self, which: str | int) -> Trace:
        """The trace of one rollout. Raises LookupError if there is none, ValueError if it has no spans."""
        return spans_to_trace(self.spans(which), counters=self.rollout(which).counters)

    def credit(self, *, rollout: str | int | None = None, step: int | None = None) -> list[CallCredit]:
        """Credit of one rollout's calls, of one step's, or all."""
        where, values = ["1"], list[Any]()
        if rollout is not None:
            where.append("rollout = ?")
            values.append(self.rollout(rollout).id)
        if step is not None:
            where.append("step = ?")
            values.append(step)
        columns = "rollout, call, agent, step, reward, advantage, tokens"
        rows = self._rows(
            f"SELECT {columns} FROM credit WHERE {' AND '.join(where)} ORDER BY step, rollout, call", *values
        )
        return [CallCredit(**dict(zip(columns.split(", "), row, strict=True))) for row in rows]

    def steps(self) -> dict[int, dict[str, Any]]:
        """Metrics of each step, in order."""
        return {step: json.loads(text) for step, text in self._rows("SELECT step, metrics FROM steps ORDER BY step")}

    def tokens_sampled(self) -> int:
        """Tokens sampled by models whose tokens are known, in every rollout."""
        ((octets,),) = self._rows("SELECT coalesce(sum(length(data)), 0) FROM arrays WHERE key = ?", OUTPUT_IDS)
        return int(octets) // 4

    def agents(self) -> dict[str | None, int]:
        """How many calls each agent made, by name; None stands for calls outside every agent. Most calls first."""
        query = "SELECT agent, count(*) FROM spans WHERE operation = 'chat' GROUP BY agent ORDER BY 2 DESC, 1"
        return dict(self._rows(query))

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _record(row: Sequence[Any]) -> RolloutRecord:
    (
        ordinal,
        identity,
        step,
        task_id,
        phase,
        attempt,
        status,
        reward,
        error,
        version,
        started,
        ended,
        calls,
        counters,
    ) = row
    return RolloutRecord(
        id=identity,
        step=step,
        task_id=task_id,
        phase=phase,
        attempt=attempt,
        status=status,
        reward=reward,
        error=error,
        version=version,
        started_ns=started,
        ended_ns=ended,
        counters=json.loads(counters),
        ordinal=ordinal,
        calls=calls,
    )


def _attributes(text: str) -> dict[str, Any]:
    """OpenTelemetry's sequences are tuples; JSON made lists of them."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(text).items()}
