"""Reads Spider's own format: JSON files and SQLite databases.

Set the folder that contains ``train_spider.json``, ``dev.json``, ``tables.json`` and ``database/<name>/<name>.sqlite``::

    tasks:
      train: {source: "examples.text_to_sql.spider:train", args: {folder: data/spider}}
      eval: {source: "examples.text_to_sql.spider:test", args: {folder: data/spider}}

Spider has one filling of each database, so a wrong query can pass by chance. Its test databases have no example queries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.text_to_sql.execution import QueryError, execute
from examples.text_to_sql.tasks import Task


def train(folder: str) -> list[Task]:
    """The questions of ``train_spider.json``."""
    return _tasks(Path(folder), "train_spider.json", "train")


def test(folder: str) -> list[Task]:
    """The questions of ``dev.json``, about databases not in training."""
    return _tasks(Path(folder), "dev.json", "test")


def _tasks(folder: Path, file: str, split: str) -> list[Task]:
    """The questions whose gold query can be executed; a few of Spider's cannot."""
    schemas = {schema["db_id"]: _schema(schema) for schema in _read(folder / "tables.json")}
    tasks: list[Task] = []
    for index, item in enumerate(_read(folder / file)):
        name, sql = item["db_id"], item["query"].strip().rstrip(";")
        database = str(folder / "database" / name / f"{name}.sqlite")
        try:
            execute(database, sql)
        except QueryError:
            continue
        tasks.append(
            {
                "id": f"{name}-{split}-{index}",
                "split": split,
                "kind": "spider",
                "question": item["question"],
                "schema": schemas[name],
                "examples": [],
                "databases": [database],
                "sql": sql,
                "ordered": "order by" in sql.lower(),
            }
        )
    return tasks


def _schema(schema: dict[str, Any]) -> str:
    """Tables and columns in the format of `tasks`, plus foreign keys, whose names may differ."""
    tables: list[str] = schema["table_names_original"]
    columns: list[tuple[int, str]] = [tuple(column) for column in schema["column_names_original"]]
    listed = [f"{table}({', '.join(name for t, name in columns if t == i)})" for i, table in enumerate(tables)]

    def full(column: int) -> str:
        table, name = columns[column]
        return f"{tables[table]}.{name}"

    keys = [f"{full(a)} = {full(b)}" for a, b in schema["foreign_keys"]]
    return ", ".join(listed) + (f"\nKeys: {', '.join(keys)}" if keys else "")


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))
