"""Reads Spider (Yu et al., 2018): questions over databases with rows, and their gold queries.

Set the folder with ``tables.json``, ``database/<name>/<name>.sqlite`` and the questions in one of two formats: Spider's own
``train_spider.json`` and ``dev.json``, or ``train.jsonl`` and ``dev.jsonl``, whose lines may also say whether an example is ``sound``::

    tasks:
      train: {source: "examples.text_to_sql.spider:train", args: {folder: data/spider}}
      eval: {source: "examples.text_to_sql.spider:validation", args: {folder: data/spider}}

Spider has one filling of each database, so a wrong query can pass by chance. Only sound examples become tasks; what is left out is
counted in the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from examples.text_to_sql.gold import defect, is_one_table, is_ordered
from examples.text_to_sql.schema_examples import schema_examples
from examples.text_to_sql.tasks import Task

logger = logging.getLogger(__name__)

Subset = Literal["one-table", "all"]

VALIDATION_SHARE = 7
"""About one of this many training databases is set aside for validation."""


def train(
    folder: str,
    *,
    subset: Subset = "all",
    max_schema: int | None = None,
    examples: Sequence[str] = (),
    own_examples: int = 0,
) -> list[Task]:
    """Training questions, in an order that mixes the databases.

    ``subset``: ``one-table`` keeps the questions whose gold query reads one table (see `gold.is_one_table`). ``max_schema``: the most
    characters of a database's schema, as shown in the prompt. ``examples``: the ids of training examples to show in every prompt, such
    as ``train-0761``, the number counted from 0; they are not tasks. ``own_examples``: the number of examples made from the schema of
    the question's own database (see `schema_examples`). Raises ValueError for a folder or id that does not fit.
    """
    return _Reader(folder, subset, max_schema, examples, own_examples).tasks("train")


def validation(
    folder: str,
    *,
    subset: Subset = "all",
    max_schema: int | None = None,
    examples: Sequence[str] = (),
    own_examples: int = 0,
) -> list[Task]:
    """Questions about the training databases that are set aside, for tuning. Arguments as in `train`."""
    return _Reader(folder, subset, max_schema, examples, own_examples).tasks("validation")


def test(
    folder: str,
    *,
    subset: Subset = "all",
    max_schema: int | None = None,
    examples: Sequence[str] = (),
    own_examples: int = 0,
) -> list[Task]:
    """The questions of Spider's development set, about databases not in training. Arguments as in `train`."""
    return _Reader(folder, subset, max_schema, examples, own_examples).tasks("test")


def is_validation(database: str) -> bool:
    """Whether a training database is set aside. Depends on its name only."""
    return hashlib.sha256(database.encode()).digest()[0] % VALIDATION_SHARE == 0


def gold_response(task: Mapping[str, Any], prompt: str) -> str:
    """The gold query, for `examples.demonstrations`."""
    del prompt
    return f"{' '.join(task['sql'].split())};"


class _Reader:
    """One folder and the arguments of a split."""

    def __init__(
        self, folder: str, subset: Subset, max_schema: int | None, examples: Sequence[str], own_examples: int
    ) -> None:
        if subset not in ("one-table", "all"):
            raise ValueError(f"subset: found {subset!r}, expected 'one-table' or 'all'")
        self.folder = Path(folder)
        self.one_table, self.max_schema = subset == "one-table", max_schema
        described = _json(self.folder / "tables.json")
        self.schemas = {schema["db_id"]: _schema(schema, keys=subset == "all") for schema in described}
        self.own = {
            schema["db_id"]: [
                [*example, self.schemas[schema["db_id"]]] for example in schema_examples(schema, own_examples)
            ]
            for schema in described
        }
        self.shown = set(examples)
        self.examples = self._examples(examples)

    def tasks(self, split: Literal["train", "validation", "test"]) -> list[Task]:
        """The sound questions of a split."""
        left_out: Counter[str] = Counter()
        tasks: list[Task] = []
        for item in self._items("dev" if split == "test" else "train"):
            if split != "test" and is_validation(item["db_id"]) != (split == "validation"):
                continue
            if reason := self._reason(item):
                left_out[reason] += 1
            else:
                tasks.append(self._task(item, split))
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())) or "none"
        logger.info("Spider, %s: %d tasks, left out: %s", split, len(tasks), reasons)
        return sorted(tasks, key=lambda task: hashlib.sha256(task["id"].encode()).digest())

    def _reason(self, item: dict[str, Any]) -> str | None:
        """The reason an example is not a task, or None."""
        if item["id"] in self.shown:
            return "shown in the prompt"
        if self.one_table and not is_one_table(item["query"]):
            return "not about one table"
        if self.max_schema is not None and len(self._schema(item)) > self.max_schema:
            return f"with a schema of more than {self.max_schema} characters"
        if not self._database(item).is_file():
            return "without a database"
        if "sound" in item:
            return None if item["sound"] else item.get("defect", "not sound")
        return defect(str(self._database(item)), item["query"])

    def _task(self, item: dict[str, Any], split: str) -> Task:
        return {
            "id": item["id"],
            "split": split,
            "kind": "spider",
            "question": item["question"],
            "schema": self._schema(item),
            "examples": self.examples + self.own[item["db_id"]],
            "databases": [str(self._database(item))],
            "sql": item["query"],
            "ordered": is_ordered(item["query"]),
        }

    def _examples(self, ids: Sequence[str]) -> list[list[str]]:
        """Question, query and schema of each example."""
        items = {item["id"]: item for item in self._items("train")} if ids else {}
        if unknown := [name for name in ids if name not in items]:
            raise ValueError(
                f"examples: no {unknown[0]!r} in {self.folder}; expected ids such as {next(iter(items))!r}"
            )
        if held_out := [name for name in ids if is_validation(items[name]["db_id"])]:
            raise ValueError(f"examples: {held_out[0]!r} is about a database of the validation split; choose another")
        chosen = [items[name] for name in ids]
        return [[item["question"], " ".join(item["query"].split()), self._schema(item)] for item in chosen]

    def _items(self, part: Literal["train", "dev"]) -> list[dict[str, Any]]:
        """The examples of a file in the fields of the JSON Lines format. Ids are the places in Spider's own files."""
        own = self.folder / {"train": "train_spider.json", "dev": "dev.json"}[part]
        lines = self.folder / f"{part}.jsonl"
        if own.is_file():
            items = [{"id": f"{part}-{index:04d}", **item} for index, item in enumerate(_json(own))]
        elif lines.is_file():
            items = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines() if line.strip()]
        else:
            raise ValueError(
                f"found neither {own.name} nor {lines.name} in {self.folder}; set `folder` to a copy of Spider"
            )
        return [{**item, "query": item["query"].strip().rstrip(";")} for item in items]

    def _schema(self, item: dict[str, Any]) -> str:
        if item["db_id"] not in self.schemas:
            raise ValueError(f"{item['id']} is about {item['db_id']!r}, which is not in {self.folder / 'tables.json'}")
        return self.schemas[item["db_id"]]

    def _database(self, item: dict[str, Any]) -> Path:
        return self.folder / "database" / item["db_id"] / f"{item['db_id']}.sqlite"


def _schema(schema: dict[str, Any], *, keys: bool) -> str:
    """Tables and columns in the format of `tasks`; with ``keys`` also the foreign keys, whose names may differ."""
    tables: list[str] = schema["table_names_original"]
    columns: list[tuple[int, str]] = [tuple(column) for column in schema["column_names_original"]]
    listed = ", ".join(f"{table}({', '.join(name for t, name in columns if t == i)})" for i, table in enumerate(tables))

    def full(column: int) -> str:
        table, name = columns[column]
        return f"{tables[table]}.{name}"

    pairs = ", ".join(f"{full(a)} = {full(b)}" for a, b in schema["foreign_keys"])
    return f"{listed}\nKeys: {pairs}" if keys and pairs else listed


def _json(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"found no {path.name} in {path.parent}; set `folder` to a copy of Spider")
    return json.loads(path.read_text(encoding="utf-8"))
