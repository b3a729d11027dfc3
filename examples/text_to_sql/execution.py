"""Executes untrusted queries and compares their results."""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from examples.text_to_sql.databases import locate

Row = tuple[object, ...]

MAX_STEPS = 20_000_000
"""Instructions of SQLite's virtual machine. Unlike time, independent of the load."""
MAX_SECONDS = 5.0
MAX_ROWS = 20_000
"""About twice the largest gold result of Spider."""
MAX_BYTES = 1_000_000
_TICK = 10_000

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


class QueryError(Exception):
    """The query was rejected, failed or took too long. The text is shown to the agent."""


def _authorize(action: int, *_: object) -> int:
    return sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY


def execute(
    database: str, sql: str, *, reverse: bool = False, max_steps: int = MAX_STEPS, max_seconds: float = MAX_SECONDS
) -> list[Row]:
    """The rows of one SELECT, executed on its own read-only connection. Thread-safe.

    ``reverse``: SQLite scans in reverse where the query does not set the order. Raises `QueryError` for other or several
    statements, for errors, and if a limit is exceeded.
    """
    if not sql.lstrip().lower().startswith(("select", "with")):
        raise QueryError("not a SELECT")
    ticks = itertools.count(1)
    deadline = time.monotonic() + max_seconds
    connection = sqlite3.connect(f"{locate(database).absolute().as_uri()}?mode=ro", uri=True)
    try:
        connection.text_factory = lambda raw: raw.decode(errors="replace")  # Spider contains text that is not UTF-8
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
        connection.execute(f"PRAGMA reverse_unordered_selects = {int(reverse)}")  # before the authorizer denies it
        connection.set_authorizer(_authorize)
        connection.set_progress_handler(lambda: next(ticks) * _TICK > max_steps or time.monotonic() > deadline, _TICK)
        rows = connection.execute(sql).fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning) as error:
        text = "took too long" if str(error) == "interrupted" else str(error)
        raise QueryError(text[:80]) from error
    finally:
        connection.close()
    if len(rows) > MAX_ROWS:
        raise QueryError("too many rows")
    return rows


@lru_cache(maxsize=4096)
def _gold(database: str, sql: str) -> list[Row]:
    return execute(database, sql)


def _normal(rows: Sequence[Row]) -> list[Row]:
    return [tuple(round(value, 4) if isinstance(value, float) else value for value in row) for row in rows]


def same_result(rows: Sequence[Row], wanted: Sequence[Row], *, ordered: bool) -> bool:
    """Whether two results are equal.

    The order of rows is compared only if ``ordered``. The order of columns is ignored for up to four columns.
    """
    if len(rows) != len(wanted) or (rows and len(rows[0]) != len(wanted[0])):
        return False
    rows, wanted = _normal(rows), _normal(wanted)
    width = len(rows[0]) if rows else 0
    orders = itertools.permutations(range(width)) if width <= 4 else [range(width)]
    for order in orders:
        moved = [tuple(row[i] for i in order) for row in rows]
        if moved == wanted if ordered else Counter(moved) == Counter(wanted):
            return True
    return False


def execution_match(databases: Sequence[str], sql: str, gold: str, *, ordered: bool) -> bool:
    """Whether the query gives the gold query's result on all databases."""
    try:
        return all(same_result(execute(name, sql), _gold(name, gold), ordered=ordered) for name in databases)
    except QueryError:
        return False
