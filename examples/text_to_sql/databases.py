"""Two SQLite files for each schema, filled with data from fixed seeds.

Rows, labels and sizes differ, so a wrong query that matches one filling by chance is unlikely to match both. The files are created
on first use in the user's cache folder. Their names contain a digest of their content.
"""

from __future__ import annotations

import hashlib
import os
import random
import sqlite3
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from examples.text_to_sql.schemas import SCHEMAS, Schema, Table

PREFIX = "generated:"
FILLINGS = (1, 2)
ROWS = {1: (40, 110), 2: (53, 131)}
"""Rows in a table without and with a parent, for each filling."""

_FIRST = "Ana Ben Eva Leo Lea Max Mia Sam Tom Zoe Ada Ian Kim Liv Noa Raj Uma Yan"
_LAST = "Adams Brook Chen Diaz Evans Fox Gray Hill Ito Jones Kaya Lund Moss Novak Okoye Park Quinn Reed Silva Weber"
_ADJECTIVES = "Silent Golden Lost Broken Hidden Early Last Wild Cold Bright Distant Empty Quiet Royal Secret"
_NOUNS = "River Garden Winter Letter House Voyage Mirror Island Summer Forest Bridge Shadow Morning Harbor Road"


def names(schema: Schema) -> list[str]:
    """The names of a schema's databases, as used in tasks. `locate` resolves them."""
    return [f"{PREFIX}{schema.name}/{filling}" for filling in FILLINGS]


@cache
def locate(name: str) -> Path:
    """The SQLite file ``name``: a path, or a generated database, created if missing."""
    if not name.startswith(PREFIX):
        return Path(name)
    schema, filling = name.removeprefix(PREFIX).split("/")
    return _build(SCHEMAS[schema], int(filling))


def _labels(table: Table, count: int, rng: random.Random) -> list[str]:
    """Distinct names for the rows of a table."""
    if table.labels == "code":
        return [f"{table.name[0].upper()}{number}" for number in rng.sample(range(100, 1000), count)]
    if table.labels == "person":
        pool = [f"{first} {last}" for first in _FIRST.split() for last in _LAST.split()]
    else:
        pool = [f"{adjective} {noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split()]
    return rng.sample(pool, count)


def _numbers(low: int, high: int, count: int, rng: random.Random) -> list[int]:
    """Numbers of a range, distinct if possible, so most superlatives are unique."""
    span = range(low, high + 1)
    return rng.sample(span, count) if len(span) >= 2 * count else rng.choices(span, k=count)


def _rows(schema: Schema, filling: int) -> dict[str, list[tuple[str | int, ...]]]:
    """The rows of all tables. Keys are shuffled, so no column correlates with another."""
    rng = random.Random(f"{schema.name}/{filling}")
    keys: dict[str, list[int]] = {}
    rows: dict[str, list[tuple[str | int, ...]]] = {}
    for table in schema.tables:
        count = ROWS[filling][table.parent is not None]
        keys[table.name] = rng.sample(range(1, 4 * count), count)
        values: dict[str, Sequence[str | int]] = {f"{table.name}_id": keys[table.name]}
        values[table.label] = _labels(table, count, rng)
        values |= {column: _numbers(low, high, count, rng) for column, (low, high) in table.numbers.items()}
        values |= {column: rng.choices(texts, k=count) for column, texts in table.categories.items()}
        if table.parent:
            values[f"{table.parent}_id"] = rng.choices(keys[table.parent], k=count)
        rows[table.name] = list(zip(*(values[column] for column in schema.columns(table)), strict=True))
    return rows


def _create(schema: Schema, table: Table) -> str:
    types = {table.label: "TEXT", **dict.fromkeys(table.categories, "TEXT"), f"{table.name}_id": "INTEGER PRIMARY KEY"}
    if table.parent:
        types[f"{table.parent}_id"] = f"INTEGER REFERENCES {table.parent}"
    columns = ", ".join(f"{column} {types.get(column, 'INTEGER')}" for column in schema.columns(table))
    return f"CREATE TABLE {table.name} ({columns})"


def _build(schema: Schema, filling: int) -> Path:
    rows = _rows(schema, filling)
    statements = [_create(schema, table) for table in schema.tables]
    digest = hashlib.sha256(repr((statements, rows)).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-rl" / "text_to_sql"
    path = folder / f"{schema.name}-{filling}-{digest}.sqlite"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=folder)  # renamed when complete: another process may create the same file
    os.close(handle)
    connection = sqlite3.connect(draft)
    for statement in statements:
        connection.execute(statement)
    for table, values in rows.items():
        connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values[0]))})", values)
    connection.commit()
    connection.close()
    os.replace(draft, path)
    return path
