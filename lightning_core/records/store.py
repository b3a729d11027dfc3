"""The durable record of a run in one SQLite file: rollouts, spans, credit, steps.

Writes are on disk when a method returns (`Store.queue_rollouts`: when its future is done): they survive a crash of the process or the
machine. Only the trainer's process writes; others can read at the same time (``read_only``). All methods are thread-safe.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from lightning_core.errors import RecordError
from lightning_core.records.failures import StoreErrors
from lightning_core.records.ledger import Ledger, call_entries, event_entry
from lightning_core.records.sqlite.database import open_database, transaction
from lightning_core.records.sqlite.group_commit import GroupCommit
from lightning_core.records.sqlite.span_rows import OUTPUT_TOKENS_PATH, AttributeReader, SpanRows, plain_rows, to_rows
from lightning_core.records.sqlite.values import storable
from lightning_core.trace import (
    CREDENTIALS,
    DROPPED,
    HOST,
    OPERATION,
    OUTPUT_IDS,
    REASON,
    REFUSED,
    REPLAYS,
    REQUEST_MODEL,
    REQUESTS,
    RESPONSE_MODEL,
    TRAINED,
    SpanRecord,
    Trace,
    spans_to_trace,
)

Phase = Literal["train", "fork", "judge", "eval_before", "eval", "eval_after", "eval_manual", "eval_unfinished"]
"""``fork``: forks of ``train`` rollouts. ``eval_manual``: evaluations by `loop.evaluate`. ``eval_unfinished``: the run's own, until all
their rollouts are stored."""
Status = Literal[
    "ok", "failed", "masked", "max_calls", "infrastructure", "invalid", "timeout", "overflow", "refused", "unauthorized", "late",
    "stream_error",
]  # fmt: skip
"""See `rollouts.outcome`."""
LEFT_OUT: frozenset[Status] = frozenset(get_args(Status)) - {"ok", "failed", "masked", "max_calls"}
"""The statuses of rollouts that are neither trained on nor part of a mean."""
COUNTED = f"status NOT IN ({', '.join(repr(status) for status in sorted(LEFT_OUT))})"
"""The condition of the rollouts that are not `LEFT_OUT`."""

_REPEATED = (
    "SELECT rollout, span_id FROM spans WHERE rollout IN (SELECT id FROM rollouts WHERE phase = 'fork') "
    f"""AND json_extract(attributes, '$."{REPLAYS}"') IS NOT NULL"""
)
"""The calls of forks that were answered from the record."""


def step_of(phase: Phase, updates: int) -> int:
    """The step, from 1, of a rollout of ``phase`` that starts after ``updates`` updates. An evaluation belongs to the step before it.

    Step 0 is before training.
    """
    return updates if phase.startswith("eval") else updates + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One attempt at one task."""

    id: str
    """The trace's id: 32 hexadecimal digits."""
    step: int
    """See `step_of`."""
    task_id: str
    phase: Phase
    attempt: int
    """Number of earlier attempts that were infrastructure failures."""
    status: Status
    """See `rollouts.outcome`."""
    reward: float | None
    error: str | None
    version: int | None
    """Policy version at its start; None without a trained policy, or with several."""
    started_ns: int
    ended_ns: int
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of recording failures, by kind."""
    ordinal: int = 0
    """Its number in the store, from 1; assigned by the store."""
    calls: int = 0
    """Number of model calls among its spans; counted by the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCredit:
    """The credit of one call in training."""

    rollout: str
    call: str
    agent: str
    step: int
    """The step whose update trained on it, from 1."""
    reward: float
    """The value that the reward rule gave it (`Credit.values`)."""
    advantage: float
    tokens: int
    """Sampled tokens of this call in the loss."""


class Store:
    """The store in the file ``path``, created unless ``read_only``; a context manager.

    Raises `ConfigError` if there is no file to read, or if it is not a store of this version. All methods raise `RecordError` if the
    file cannot be read or written.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        self._errors = StoreErrors(self.path)
        with self._errors:
            self._db = open_database(self.path, read_only=read_only)
        self._queue = GroupCommit(self.add_rollouts, storage_errors=(RecordError, sqlite3.OperationalError, OSError))

    @contextmanager
    def _transaction(self) -> Generator[None]:
        with self._lock, self._errors, transaction(self._db):
            yield

    def add_rollout(self, record: RolloutRecord, spans: Iterable[SpanRecord]) -> int:
        """Write one rollout with all its spans atomically; returns its ordinal.

        Raises ValueError if a span belongs to another rollout, or if the rollout is already stored.
        """
        return self.add_rollouts([(record, spans)])[0]

    def add_rollouts(self, rollouts: Iterable[tuple[RolloutRecord, Iterable[SpanRecord]]]) -> list[int]:
        """`add_rollout` for several rollouts in one transaction: all are written, or none."""
        prepared = [(record, *_rows_of(record, spans)) for record, spans in rollouts]
        with self._transaction():
            return [self._add_rollout(record, calls, rows) for record, calls, rows in prepared]

    def queue_rollouts(self, rollouts: Sequence[tuple[RolloutRecord, Sequence[SpanRecord]]]) -> Future[None]:
        """`add_rollouts` on the store's own thread; rollouts queued during a write share the next transaction."""
        return self._queue.add(rollouts)

    def _add_rollout(self, r: RolloutRecord, calls: int, rows: SpanRows) -> int:
        columns = {name: getattr(r, name) for name in _ROLLOUT}
        values = {**columns, "calls": calls, "counters": json.dumps(dict(r.counters))}
        try:
            cursor = self._db.execute(_insert("rollouts", tuple(values)), storable(values))
        except sqlite3.IntegrityError as error:
            raise ValueError(f"rollout {r.id} cannot be stored: {error}") from error
        self._add_rows(rows)
        contents = [(r.id, number, data) for number, data in enumerate(rows.contents)]
        self._db.executemany("INSERT INTO contents VALUES (?, ?, ?)", contents)
        return int(cursor.lastrowid or 0)

    def _add_rows(self, rows: SpanRows) -> None:
        for table, values in (("spans", rows.spans), ("arrays", rows.arrays)):
            for row in values:
                self._db.execute(_insert(table, tuple(row)), storable(row))

    def add_spans(self, spans: Iterable[SpanRecord]) -> None:
        """Add spans to rollouts that are already stored."""
        rows = plain_rows(spans)
        with self._transaction():
            self._add_rows(rows)

    def add_arrays(self, key: str, arrays: Mapping[tuple[str, str], bytes]) -> None:
        """Add the attribute ``key`` to stored spans, given by rollout and span id; replaces earlier values."""
        values = [dict(zip(_ARRAY, (*ids, key, data), strict=True)) for ids, data in arrays.items()]
        with self._transaction():
            self._db.executemany(_insert("arrays", _ARRAY, "INSERT OR REPLACE"), values)

    def has_arrays(self, key: str) -> bool:
        """Whether any stored span has the array ``key``."""
        return bool(list(self.select("SELECT 1 FROM arrays WHERE key = ? LIMIT 1", key)))

    def add_credit(self, rows: Iterable[CallCredit]) -> None:
        """Write the credit of calls of stored rollouts; replaces earlier credit of the same calls."""
        values = [storable({name: getattr(row, name) for name in _CREDIT}) for row in rows]
        with self._transaction():
            try:
                self._db.executemany(_insert("credit", _CREDIT, "INSERT OR REPLACE"), values)
            except sqlite3.IntegrityError as error:
                reason = "credit for a rollout that is not stored, or a value that is not a number"
                raise ValueError(f"{reason}: {error}") from error

    def add_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step's metrics; replaces earlier metrics of the same step."""
        values = {"step": step, "metrics": json.dumps(dict(metrics))}
        with self._transaction():
            self._db.execute(_insert("steps", tuple(values), "INSERT OR REPLACE"), values)

    def rewind(self, step: int, *, keep: Iterable[str] = ()) -> None:
        """Delete what a run resumed after ``step`` repeats. ``keep``: the ids of rollouts that it does not repeat."""
        repeated = "(step > ? OR phase = 'eval_unfinished') AND id NOT IN (SELECT value FROM json_each(?))"
        with self._transaction():
            self._delete(repeated, step, json.dumps(list(keep)))
            self._db.execute("DELETE FROM steps WHERE step > ?", (step,))

    def remove(self, rollouts: Iterable[str]) -> None:
        """Delete the rollouts with these ids."""
        with self._transaction():
            self._delete("id IN (SELECT value FROM json_each(?))", json.dumps(list(rollouts)))

    def _delete(self, where: str, *values: Any) -> None:
        # The tables that refer to rollouts first: a cascade would delete from them rollout by rollout.
        for table in ("contents", "arrays", "spans", "credit"):
            ids = f"SELECT id FROM rollouts WHERE {where}"
            self._db.execute(f"DELETE FROM {table} WHERE rollout IN ({ids})", values)
        self._db.execute(f"DELETE FROM rollouts WHERE {where}", values)

    def change_phase(self, old: Phase, new: Phase, step: int) -> int:
        """Change the phase of all rollouts of phase ``old`` at ``step``, atomically; returns their number."""
        change = "UPDATE rollouts SET phase = ? WHERE phase = ? AND step = ?"
        with self._transaction():
            return self._db.execute(change, (new, old, step)).rowcount

    def rollouts(
        self,
        *,
        phase: Phase | None = None,
        step: int | None = None,
        status: Status | None = None,
        last: int | None = None,
    ) -> list[RolloutRecord]:
        """Rollouts that match all given filters, in the order they were stored; of these the ``last`` ones, if given."""
        filters = {"phase": phase, "step": step, "status": status}
        conditions = {key: value for key, value in filters.items() if value is not None}
        where = " AND ".join(f"{key} = ?" for key in conditions) or "1"
        query = f"SELECT * FROM rollouts WHERE {where} ORDER BY ordinal DESC LIMIT ?"
        return self.records(query, *conditions.values(), -1 if last is None else last)[::-1]

    def rollout(self, which: str | int) -> RolloutRecord:
        """One rollout by id or ordinal. Raises LookupError if it is not stored."""
        key = "ordinal" if isinstance(which, int) else "id"
        rows = self.select(f"SELECT * FROM rollouts WHERE {key} = ?", which)
        if not rows:
            raise LookupError(f"no rollout with {key} {which!r}; the store has {self.count()}, numbered from 1")
        return _record(rows[0])

    def count(self) -> int:
        """Number of rollouts."""
        return int(self.select("SELECT count(*) AS count FROM rollouts")[0]["count"])

    def spans(self, which: str | int, *, only: str | None = None) -> tuple[SpanRecord, ...]:
        """The spans of one rollout, in order of start; with ``only``, the one with this id."""
        rollout = self.rollout(which).id
        where, values = ("rollout = ?", [rollout]) if only is None else ("rollout = ? AND span_id = ?", [rollout, only])
        arrays: dict[str, dict[str, bytes]] = {}
        for row in self.select(f"SELECT span_id, key, data FROM arrays WHERE {where}", *values):
            arrays.setdefault(row["span_id"], {})[row["key"]] = row["data"]
        columns = "span_id, parent_id, name, start_ns, end_ns, error, attributes"
        rows = self.select(f"SELECT {columns} FROM spans WHERE {where} ORDER BY start_ns, span_id", *values)
        content = "SELECT data FROM contents WHERE rollout = ? AND number = ?"
        reader = AttributeReader(lambda number: self.select(content, rollout, number)[0]["data"])
        return tuple(
            SpanRecord(
                trace_id=rollout,
                span_id=row["span_id"],
                parent_id=row["parent_id"],
                name=row["name"],
                start_ns=row["start_ns"],
                end_ns=row["end_ns"],
                error=row["error"],
                attributes=reader.read(row["attributes"], arrays.get(row["span_id"], {})),
            )
            for row in rows
        )

    def trace(self, which: str | int) -> Trace:
        """The trace of one rollout. Raises LookupError if not stored, ValueError without spans."""
        return spans_to_trace(self.spans(which), counters=self.rollout(which).counters)

    def credit(self, *, rollout: str | int | None = None, step: int | None = None) -> list[CallCredit]:
        """Credit of all calls, or of the calls of one rollout or step."""
        where, values = ["1"], list[Any]()
        if rollout is not None:
            where.append("rollout = ?")
            values.append(self.rollout(rollout).id)
        if step is not None:
            where.append("step = ?")
            values.append(step)
        query = f"SELECT * FROM credit WHERE {' AND '.join(where)} ORDER BY step, rollout, call"
        return [CallCredit(**{name: row[name] for name in _CREDIT}) for row in self.select(query, *values)]

    def steps(self) -> dict[int, dict[str, Any]]:
        """Metrics by step, in order of steps."""
        rows = self.select("SELECT step, metrics FROM steps ORDER BY step")
        return {row["step"]: json.loads(row["metrics"]) for row in rows}

    def tokens_sampled(self) -> int:
        """Number of sampled tokens with recorded ids, in all rollouts."""
        octets = "SELECT sum(length(data)) / 4 AS number FROM arrays WHERE key = ?"
        shared = "SELECT sum(json_extract(attributes, ?)) AS number FROM spans WHERE operation = 'chat'"
        repeated = f" AND (rollout, span_id) IN ({_REPEATED})"
        return sum(
            sign * int(self.select(query + where, value)[0]["number"] or 0)
            for query, value in ((octets, OUTPUT_IDS), (shared, OUTPUT_TOKENS_PATH))
            for sign, where in ((1, ""), (-1, repeated))
        )

    def ledger(self, *, after: int = 0, rollouts: Sequence[str] | None = None) -> Ledger:
        """The number of requests for each entry of the ledger.

        Of all rollouts stored ``after`` this ordinal, or of those with the ids ``rollouts``.
        """
        names = (REQUEST_MODEL, RESPONSE_MODEL, HOST, CREDENTIALS, TRAINED, REFUSED, DROPPED, REASON, REQUESTS)
        values = ", ".join(f'json_extract(attributes, \'$."{name}"\') AS "{name}"' for name in names)
        groups = ", ".join(str(n) for n in range(1, len(names) + 4))
        which, chosen = "", list[Any]()
        if rollouts is not None:  # as one value: SQLite limits the number of values
            which, chosen = "AND rollout IN (SELECT value FROM json_each(?))", [json.dumps(list(rollouts))]
        elif after:
            which, chosen = "AND rollout IN (SELECT id FROM rollouts WHERE ordinal > ?)", [after]
        query = (
            f"SELECT agent, operation, error IS NOT NULL AS failed, {values}, count(*) AS number FROM spans "
            f"WHERE operation IS NOT NULL AND (rollout, span_id) NOT IN ({_REPEATED}) {which} GROUP BY {groups}"
        )
        trained, ledger = self.credited_agents(), Ledger()
        for row in self.select(query, *chosen):
            attributes = {name: row[name] for name in names if row[name] is not None} | {OPERATION: row["operation"]}
            if row["operation"] == "chat":
                attributes[DROPPED] = json.loads(attributes.get(DROPPED, "[]"))
                entries = call_entries(attributes, row["agent"], failed=bool(row["failed"]), trained=trained)
                ledger.update(dict.fromkeys(entries, row["number"]))
            elif (entry := event_entry(attributes, row["agent"])) is not None:
                ledger[entry] += row["number"] * int(attributes.get(REQUESTS, 1))
        return ledger

    def credited_agents(self) -> set[str]:
        """The agents with credit: those that were trained."""
        return {row["agent"] for row in self.select("SELECT DISTINCT agent FROM credit")}

    def records(self, query: str, *values: Any) -> list[RolloutRecord]:
        """The rollouts that ``query`` selects, with all columns."""
        return [_record(row) for row in self.select(query, *values)]

    def select(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """The rows of a SELECT statement on the tables of `schema`."""
        with self._lock, self._errors:
            return self._db.execute(query, values).fetchall()

    def close(self) -> None:
        """Write what is queued and close the file; closing twice does nothing."""
        self._queue.close()
        with self._lock, self._errors:
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


_ARRAY: tuple[str, ...] = ("rollout", "span_id", "key", "data")
_CREDIT = tuple(column.name for column in fields(CallCredit))
_ROLLOUT = tuple(column.name for column in fields(RolloutRecord) if column.name != "ordinal")


@cache
def _insert(table: str, columns: tuple[str, ...], verb: str = "INSERT") -> str:
    """The statement that inserts one row of named values into ``table``."""
    return f"{verb} INTO {table} ({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})"


def _rows_of(r: RolloutRecord, spans: Iterable[SpanRecord]) -> tuple[int, SpanRows]:
    """The number of calls among ``spans``, and their rows."""
    spans = {span.span_id: span for span in spans}.values()
    foreign = next((span for span in spans if span.trace_id != r.id), None)
    if foreign is not None:
        raise ValueError(f"span {foreign.span_id} belongs to rollout {foreign.trace_id}, expected {r.id}")
    return sum(span.attributes.get(OPERATION) == "chat" for span in spans), to_rows(spans)


def _record(row: sqlite3.Row) -> RolloutRecord:
    values = {name: row[name] for name in (*_ROLLOUT, "ordinal")}
    return RolloutRecord(**{**values, "counters": json.loads(row["counters"])})
