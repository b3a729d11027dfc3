"""Spider's reader: both formats, sound examples, subsets, splits, and the counts of the real data set where it is present."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from examples.text_to_sql import prompts, spider
from examples.text_to_sql.execution import QueryError, execute, execution_match
from examples.text_to_sql.gold import defect, is_one_table, is_ordered
from examples.text_to_sql.schema_examples import schema_examples
from lightning_core.config import load_config
from tests.examples.data_sets import data_set

TRAIN, VALIDATION, TEST = "pets_1", "network_2", "pets_2"
"""Databases of the hand-made folder. Which training databases are set aside depends on their names."""
EXAMPLES = [
    (TRAIN, "Names in order?", "SELECT Name FROM Owner ORDER BY Name;"),
    (TRAIN, "Broken?", "SELECT Nme FROM Owner"),
    (TRAIN, "Kinds of the pets of Ana?", "SELECT Kind FROM Owner JOIN Pet ON OwnerID = Keeper WHERE Name = 'Ana'"),
    (TRAIN, "Birds?", "SELECT PetID FROM Pet WHERE Kind = 'bird'"),
    (TRAIN, "How many birds?", "SELECT count(*) FROM Pet WHERE Kind = 'bird'"),
    (TRAIN, "Any pet?", "SELECT PetID FROM Pet LIMIT 1"),
    (TRAIN, "How many cats?", "SELECT count(*) FROM Pet WHERE Kind  =  'cat'"),
    (VALIDATION, "How many owners?", "SELECT count(*) FROM Owner"),
]
SOUND = {0, 2, 6, 7}
DEFECTS = {
    1: "gold query fails: no such column: Nme",
    3: "empty result",
    4: "only NULL or 0",
    5: "result depends on the scan order",
}
TABLES = "Owner(OwnerID, Name), Pet(PetID, Kind, Keeper)"


def _write(folder: Path) -> None:
    """Three databases with the same tables and rows, and their description."""
    for name in (TRAIN, VALIDATION, TEST):
        path = folder / "database" / name / f"{name}.sqlite"
        path.parent.mkdir(parents=True)
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(
                """CREATE TABLE Owner (OwnerID INTEGER PRIMARY KEY, Name TEXT);
                CREATE TABLE Pet (PetID INTEGER PRIMARY KEY, Kind TEXT, Keeper INTEGER REFERENCES Owner);
                INSERT INTO Owner VALUES (1, 'Ana'), (2, CAST(x'4be96e' AS TEXT));
                INSERT INTO Pet VALUES (1, 'cat', 1), (2, 'dog', 1), (3, 'cat', 2);"""
            )
    columns = [[-1, "*"], [0, "OwnerID"], [0, "Name"], [1, "PetID"], [1, "Kind"], [1, "Keeper"]]
    schema = {
        "table_names_original": ["Owner", "Pet"],
        "table_names": ["owner", "pet"],
        "column_names_original": columns,
        "column_names": [[-1, "*"], [0, "owner id"], [0, "name"], [1, "pet id"], [1, "kind"], [1, "keeper"]],
        "column_types": ["text", "number", "text", "number", "text", "number"],
        "primary_keys": [1, 3],
        "foreign_keys": [[5, 1]],
    }
    (folder / "tables.json").write_text(json.dumps([{"db_id": name, **schema} for name in (TRAIN, VALIDATION, TEST)]))


def _items() -> list[dict[str, Any]]:
    return [{"db_id": name, "question": question, "query": sql} for name, question, sql in EXAMPLES]


@pytest.fixture
def own_format(tmp_path: Path) -> str:
    """Spider's own files."""
    _write(tmp_path)
    (tmp_path / "train_spider.json").write_text(json.dumps(_items()))
    (tmp_path / "dev.json").write_text(json.dumps([{**_items()[0], "db_id": TEST}]))
    return str(tmp_path)


@pytest.fixture
def lines_format(tmp_path: Path) -> str:
    """The same examples as JSON lines that say which are sound."""
    _write(tmp_path)
    lines = [
        {"id": f"train-{i:04d}", **item, "sound": i in SOUND} | ({"defect": "a defect"} if i not in SOUND else {})
        for i, item in enumerate(_items())
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "dev.jsonl").write_text(json.dumps({**lines[0], "id": "dev-0000", "db_id": TEST}) + "\n")
    return str(tmp_path)


@pytest.fixture(params=["own_format", "lines_format"])
def folder(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def test_both_formats_give_the_same_tasks(folder: str) -> None:
    train, validation, test = spider.train(folder), spider.validation(folder), spider.test(folder)
    assert {task["id"] for task in train} == {"train-0000", "train-0002", "train-0006"}
    assert [task["id"] for task in validation] == ["train-0007"]
    assert [task["id"] for task in test] == ["dev-0000"]
    assert {task["split"] for task in train} == {"train"}
    first = next(task for task in train if task["id"] == "train-0000")
    assert first["schema"] == f"{TABLES}\nKeys: Pet.Keeper = Owner.OwnerID"
    assert first["sql"] == "SELECT Name FROM Owner ORDER BY Name"
    assert first["ordered"] is True
    assert execution_match(first["databases"], "SELECT Name FROM Owner ORDER BY 1", first["sql"], ordered=True)
    assert not execution_match(first["databases"], "SELECT Name FROM Owner ORDER BY 1 DESC", first["sql"], ordered=True)
    assert json.loads(json.dumps(train)) == train


def test_what_is_left_out_is_counted_in_the_log(own_format: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "examples"):
        spider.train(own_format)
    (message,) = caplog.messages
    assert message.startswith("Spider, train: 3 tasks, left out: ")
    assert set(message.split("left out: ")[1].split(", ")) == {f"1 {reason}" for reason in DEFECTS.values()}


def test_a_file_that_says_what_is_sound_is_followed(lines_format: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "examples"):
        spider.train(lines_format)
    assert caplog.messages == ["Spider, train: 3 tasks, left out: 4 a defect"]


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_defects_of_gold_queries(own_format: str, index: int) -> None:
    name, _, sql = EXAMPLES[index]
    path = f"{own_format}/database/{name}/{name}.sqlite"
    assert defect(path, sql.rstrip(";")) == DEFECTS.get(index)
    assert execute(path, "SELECT PetID FROM Pet", reverse=True) == [(3,), (2,), (1,)]


def test_one_table_leaves_out_joins_and_keys(folder: str) -> None:
    tasks = spider.train(folder, subset="one-table")
    assert {task["id"] for task in tasks} == {"train-0000", "train-0006"}
    assert {task["schema"] for task in tasks} == {TABLES}


def test_long_schemas_are_left_out(folder: str) -> None:
    assert len(spider.train(folder, subset="one-table", max_schema=len(TABLES))) == 2
    assert spider.train(folder, subset="one-table", max_schema=len(TABLES) - 1) == []


def test_examples_are_shown_with_their_schema_and_are_no_tasks(folder: str) -> None:
    (task,) = spider.train(folder, subset="one-table", examples=["train-0006"])
    assert task["id"] == "train-0000"
    assert task["examples"] == [["How many cats?", "SELECT count(*) FROM Pet WHERE Kind = 'cat'", TABLES]]
    other = {**task, "schema": "Lake(Depth)"}
    messages = [str(m.content) for m in prompts.writer(other["schema"], other["examples"], other["question"])]
    assert messages[1:] == [
        f"Tables: {TABLES}\nHow many cats?",
        "SELECT count(*) FROM Pet WHERE Kind = 'cat';",
        "Tables: Lake(Depth)\nNames in order?",
    ]
    same = [str(m.content) for m in prompts.writer(task["schema"], task["examples"], task["question"])]
    assert same[-1] == "Names in order?"
    assert prompts.writer(TABLES, [], "Names?")[-1].content == f"Tables: {TABLES}\nNames?"


def test_own_examples_are_made_from_the_schema_of_the_question(folder: str) -> None:
    tasks = spider.train(folder, subset="one-table", own_examples=9)
    own = [
        ["How many owner are there for each name?", "SELECT Name, count(*) FROM Owner GROUP BY Name", TABLES],
        ["How many pet are there for each kind?", "SELECT Kind, count(*) FROM Pet GROUP BY Kind", TABLES],
    ]
    assert [task["examples"] for task in tasks] == [own, own]
    both = spider.train(folder, subset="one-table", examples=["train-0006"], own_examples=1)
    assert [example[0] for example in both[0]["examples"]] == ["How many cats?", own[0][0]]


def test_own_examples_of_all_kinds_and_tables() -> None:
    schema = {
        "table_names_original": ["Lake", "River"],
        "table_names": ["lake", "river"],
        "column_names_original": [[-1, "*"], [0, "ID"], [0, "Name"], [0, "Depth in m"], [1, "ID"], [1, "Lake"]],
        "column_names": [[-1, "*"], [0, "id"], [0, "name"], [0, "depth"], [1, "id"], [1, "lake"]],
        "column_types": ["text", "number", "text", "number", "number", "number"],
        "primary_keys": [1, 4],
        "foreign_keys": [[5, 1]],
    }
    assert [sql for _, sql in schema_examples(schema, 4)] == [
        'SELECT avg("Depth in m") FROM Lake',
        "SELECT ID, Lake FROM River",
        'SELECT Name, "Depth in m" FROM Lake',
        "SELECT avg(ID) FROM River",
    ]
    everything = schema_examples(schema, 99)
    assert len(everything) == len({sql for _, sql in everything}) == 6
    assert ("Show the name of lake ordered by depth.", 'SELECT Name FROM Lake ORDER BY "Depth in m"') in everything
    assert schema_examples(schema, 0) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"examples": ["train-9999"]}, "no 'train-9999' in .*; expected ids such as 'train-0000'"),
        ({"examples": ["train-0007"]}, "'train-0007' is about a database of the validation split"),
        ({"subset": "two-tables"}, "subset: found 'two-tables', expected 'one-table' or 'all'"),
    ],
)
def test_wrong_arguments_are_named(folder: str, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        spider.train(folder, **arguments)


def test_missing_files_are_named(own_format: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found no tables\.json in .*; set `folder` to a copy of Spider"):
        spider.train(str(tmp_path / "nowhere"))
    (Path(own_format) / "dev.json").unlink()
    with pytest.raises(ValueError, match=r"found neither dev\.json nor dev\.jsonl"):
        spider.test(own_format)


@pytest.mark.parametrize(
    ("sql", "one_table", "ordered"),
    [
        ("SELECT count(*) FROM head WHERE age  >  56", True, False),
        ("SELECT name ,  age FROM head ORDER BY age", True, True),
        ("SELECT a FROM t WHERE b = 'x, (select 1) order by'", True, False),
        ('SELECT a FROM t WHERE b = "it\'s from x, y" GROUP BY a, c ORDER  BY count(*) DESC LIMIT 1', True, True),
        ("SELECT T1.a FROM t AS T1 JOIN u AS T2 ON T1.id = T2.id", False, False),
        ("SELECT a FROM t, u", False, False),
        ("SELECT a FROM t WHERE b IN (SELECT b FROM u ORDER BY c)", False, False),
        ("SELECT a FROM t WHERE b > (SELECT avg(b) FROM t) ORDER BY a", False, True),
        ("SELECT a FROM t UNION SELECT a FROM u ORDER BY a", False, True),
        ("SELECT a FROM (SELECT a FROM t)", False, False),
    ],
)
def test_subset_and_order_follow_from_the_gold_query(sql: str, one_table: bool, ordered: bool) -> None:
    assert is_one_table(sql) is one_table
    assert is_ordered(sql) is ordered


# --- the data set itself, in both formats


def _tables(database: str) -> Iterator[str]:
    for (name,) in execute(database, "SELECT name FROM sqlite_master WHERE type = 'table'"):
        yield str(name)


def _floor(tasks: list[dict[str, Any]]) -> int:
    """Tasks whose result is the number of rows of any of the database's tables."""
    return sum(
        any(
            execution_match(task["databases"], f'SELECT count(*) FROM "{table}"', task["sql"], ordered=task["ordered"])
            for table in _tables(task["databases"][0])
        )
        for task in tasks
    )


def _databases(tasks: list[dict[str, Any]]) -> set[str]:
    return {task["databases"][0] for task in tasks}


@pytest.mark.long
def test_all_sound_examples_of_the_data_set() -> None:
    folder = str(data_set("spider"))
    train, validation, test = spider.train(folder), spider.validation(folder), spider.test(folder)
    assert (len(train), len(validation), len(test)) == (5354, 1129, 890)
    assert len(train) + len(validation) == 6483
    splits = [_databases(train), _databases(validation), _databases(test)]
    assert [len(databases) for databases in splits] == [117, 20, 19]
    assert len(set.union(*splits)) == 117 + 20 + 19
    assert _floor(test) == 51


def test_examples_made_from_schemas_run() -> None:
    folder = data_set("spider")
    failed: dict[str, QueryError] = {}
    for schema in json.loads((folder / "tables.json").read_text(encoding="utf-8")):
        for _, sql in schema_examples(schema, 6):
            try:
                execute(str(folder / "database" / schema["db_id"] / f"{schema['db_id']}.sqlite"), sql)
            except QueryError as error:
                failed[sql] = error
    # tables.json lists SQLite's own table, which these copies do not have; one table is large.
    assert len(failed) == 3
    assert {str(error) for error in failed.values()} == {"no such table: sqlite_sequence", "too many rows"}


def test_the_subset_of_the_configuration() -> None:
    folder = str(data_set("spider"))
    settings = Path(spider.__file__).with_name("spider.yaml")
    source = load_config(settings).tasks.train
    assert source is not None
    arguments: dict[str, Any] = {**source.args, "folder": folder}
    splits = [split(**arguments) for split in (spider.train, spider.validation, spider.test)]
    assert [(len(tasks), len(_databases(tasks))) for tasks in splits] == [(1693, 80), (449, 14), (397, 16)]
    assert [_floor(tasks) for tasks in splits[1:]] == [26, 39]


def test_the_checks_agree_with_the_data_set(tmp_path: Path) -> None:
    """In Spider's own format, the development set has the same sound examples but for five results.

    The data set compares sums of floats exactly, the reward rounds them.
    """
    folder = data_set("spider")
    (tmp_path / "database").symlink_to(folder / "database")
    (tmp_path / "tables.json").symlink_to(folder / "tables.json")
    items = [json.loads(line) for line in (folder / "dev.jsonl").read_text(encoding="utf-8").splitlines()]
    bare = [{key: item[key] for key in ("db_id", "question", "query")} for item in items]
    (tmp_path / "dev.json").write_text(json.dumps(bare))
    (tmp_path / "train_spider.json").write_text("[]")
    checked = {task["id"] for task in spider.test(str(tmp_path))}
    stated = {task["id"] for task in spider.test(str(folder))}
    assert stated <= checked
    defects = {item["id"]: item.get("defect") for item in items}
    assert [defects[name] for name in sorted(checked - stated)] == ["result depends on the scan order"] * 5
