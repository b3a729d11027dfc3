"""The SQL example without a model: held-out tasks, safe execution, and the paths through the graph."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from examples.text_to_sql import agent, databases, tasks
from examples.text_to_sql.execution import QueryError, execute, execution_match, same_result
from examples.text_to_sql.questions import questions
from examples.text_to_sql.schemas import HELD_OUT, SCHEMAS, TRAIN

ALL = {"train": tasks.train, "test": tasks.test, "test_schema": tasks.test_schema}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Databases are built anew, not read from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        databases.locate.cache_clear()
        yield
    databases.locate.cache_clear()


def _skeleton(task: dict[str, Any]) -> tuple[str, str]:
    return task["schema"], re.sub(r"'[^']*'|\b\d+\b", "?", task["sql"])


# --- the task set


def test_splits_share_no_question_no_query_and_no_skeleton() -> None:
    for one, other in (("train", "test"), ("train", "test_schema"), ("test", "test_schema")):
        for of in (
            lambda task: task["id"],
            lambda task: task["question"],
            lambda task: (task["schema"], task["sql"]),
            _skeleton,
        ):
            assert not {of(t) for t in ALL[one]()} & {of(t) for t in ALL[other]()}


def test_schemas_of_test_schema_are_in_no_other_split() -> None:
    trained = {task["schema"] for task in (*tasks.train(), *tasks.test())}
    assert trained == {schema.text for schema in TRAIN}
    assert {task["schema"] for task in tasks.test_schema()} == {schema.text for schema in HELD_OUT}
    assert not trained & {schema.text for schema in HELD_OUT}


def test_examples_in_the_prompt_give_no_test_away() -> None:
    for task in (*tasks.test(), *tasks.test_schema()):
        shown = {_skeleton({**task, "sql": sql}) for _, sql in task["examples"]}
        assert _skeleton(task) not in shown
    for task in tasks.train():
        assert task["question"] not in {question for question, _ in task["examples"]}


def test_the_sets_are_large_enough_and_have_the_stated_mix() -> None:
    assert (len(tasks.train()), len(tasks.test()), len(tasks.test_schema())) >= (280, 200, 70)
    for split in ALL.values():
        kinds = Counter(task["kind"] for task in split())
        share = {kind: times / sum(tasks.MIX.values()) for kind, times in tasks.MIX.items()}
        assert all(abs(kinds[kind] / len(split()) - share[kind]) < 0.03 for kind in tasks.MIX)
        used = Counter(task["schema"] for task in split())
        assert max(used.values()) - min(used.values()) <= 5


def test_tasks_are_json_with_unique_ids_and_the_same_every_time() -> None:
    for split in ALL.values():
        assert json.loads(json.dumps(split())) == split()
        assert len({task["id"] for task in split()}) == len(split())
    before = json.dumps([split() for split in ALL.values()])
    tasks.split.cache_clear()
    assert json.dumps([split() for split in ALL.values()]) == before


def test_a_question_means_one_query() -> None:
    for schema in SCHEMAS.values():
        written_questions = questions(schema)
        assert (
            len({question.text for question in written_questions})
            == len({question.sql for question in written_questions})
            == len(written_questions)
        )


def test_databases_are_built_from_fixed_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = databases.locate("generated:music/1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    again = databases.locate.__wrapped__("generated:music/1")
    assert again != first
    assert again.name == first.name
    dumps = []
    for path in (first, again):
        connection = sqlite3.connect(path)
        dumps.append(list(connection.iterdump()))
        connection.close()
    assert dumps[0] == dumps[1]


def test_foreign_keys_hold() -> None:
    for schema, filling in product(SCHEMAS.values(), databases.FILLINGS):
        connection = sqlite3.connect(databases.locate(f"generated:{schema.name}/{filling}"))
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        references = [row for t in schema.tables for row in connection.execute(f"PRAGMA foreign_key_list({t.name})")]
        assert len(references) == len(schema.tables) - 1
        connection.close()


def test_gold_queries_give_rows_and_differ_on_the_two_fillings() -> None:
    for task in (task for split in ALL.values() for task in split()):
        results = [execute(name, task["sql"]) for name in task["databases"]]
        assert all(results)
        assert not same_result(*results, ordered=False)
        assert execution_match(task["databases"], task["sql"], task["sql"], ordered=task["ordered"])


# --- wrong queries


def _mutants(task: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Queries that answer another question, by their mistake."""
    sql = task["sql"]
    schema = next(schema for schema in SCHEMAS.values() if schema.text == task["schema"])
    tables = [table for table in schema.tables if re.search(rf"\b(FROM|JOIN) {table.name}\b", sql)]
    yield "no condition", re.sub(r" WHERE .*", "", sql)
    for old, new in product("<>", ("<", ">", "<=", ">=", "=")):
        yield "comparison", sql.replace(f" {old} ", f" {new} ")
    for old, new in product(("AVG", "MAX", "MIN", "SUM"), ("AVG", "MAX", "MIN", "SUM", "COUNT")):
        yield "aggregate", sql.replace(f"{old}(", f"{new}(")
    yield "aggregate", re.sub(r"(AVG|MAX|MIN|SUM)(\(\w+\))", r"COUNT(*)", sql)
    yield "order", sql.replace(" DESC", "") if " DESC" in sql else re.sub(r"(ORDER BY \w+)", r"\1 DESC", sql)
    yield "order", re.sub(r" ORDER BY \w+( DESC)?", "", sql)
    yield "limit", re.sub(r" LIMIT 1", " LIMIT 2", sql)
    yield "group", re.sub(r" GROUP BY .*", "", sql)
    yield "join", re.sub(r" USING \(\w+\)", "", sql)
    for table in tables:
        for old, new in product((*table.numbers, *table.categories, table.label), repeat=2):
            yield "column", re.sub(rf"\b{old}\b(?!')", new, sql)
        for column, values in table.categories.items():
            for old, new in product(values, repeat=2):
                yield "value", sql.replace(f"'{old}'", f"'{new}'")
            if "WHERE" in sql and f"WHERE {column}" not in sql:
                yield "further condition", sql.replace(" WHERE ", f" WHERE {column} = '{values[0]}' AND ")
        for number, (low, high) in table.numbers.items():
            if number not in sql:  # a condition on a number in the query may follow from it
                condition = f"{number} > {low + (high - low) // 4}"
                added = re.sub(r"( GROUP BY| ORDER BY|$)", rf" WHERE {condition}\1", sql, count=1)
                more = sql.replace(" WHERE ", f" WHERE {condition} AND ")
                yield "further condition", more if "WHERE" in sql else added
    for number in re.findall(r"[<>] (\d+)", sql):
        for step in (-10, -1, 1, 10):
            yield "number", re.sub(rf"\b{number}\b", str(int(number) + step), sql)
    for table in schema.tables:
        yield "table", re.sub(r"FROM \w+", f"FROM {table.name}", sql)


def _runs(database: str, sql: str) -> bool:
    try:
        execute(database, sql)
    except QueryError:
        return False
    return True


def test_wrong_queries_fail() -> None:
    tried: Counter[str] = Counter()
    one: Counter[str] = Counter()
    both: Counter[str] = Counter()
    for task in tasks.test():
        wrong = {sql: kind for kind, sql in _mutants(task) if sql != task["sql"]}
        for sql, kind in wrong.items():
            if not _runs(task["databases"][0], sql):
                continue
            tried[kind] += 1
            if execution_match(task["databases"][:1], sql, task["sql"], ordered=task["ordered"]):
                one[kind] += 1
                both[kind] += execution_match(task["databases"], sql, task["sql"], ordered=task["ordered"])
    near = (
        "number",
        "further condition",
    )  # off by a little, or a needless condition that the one row of a maximum meets
    structural = [kind for kind in tried if kind not in near]
    assert sum(tried.values()) > 3000
    assert sum(both[kind] for kind in structural) / sum(tried[kind] for kind in structural) < 0.003
    assert sum(both.values()) / sum(tried.values()) < 0.03
    assert sum(both.values()) < 0.6 * sum(one.values())  # what the second filling is for


# --- execution


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM singer",
        "INSERT INTO singer (name) VALUES ('x')",
        "UPDATE singer SET age = 1",
        "DROP TABLE singer",
        "CREATE TABLE other (x)",
        "PRAGMA writable_schema = 1",
        "ATTACH DATABASE 'other.sqlite' AS other",
        "WITH x AS (SELECT 1) DELETE FROM singer",
        "SELECT 1; DELETE FROM singer",
        "SELECT load_extension('x')",
        "VACUUM INTO 'other.sqlite'",
        "",
        "no query at all",
    ],
)
def test_nothing_but_one_select_runs(sql: str) -> None:
    path = databases.locate("generated:music/1")
    before = path.read_bytes()
    with pytest.raises(QueryError):
        execute("generated:music/1", sql)
    assert path.read_bytes() == before
    assert execute("generated:music/1", "SELECT COUNT(*) FROM singer") == [(40,)]


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"


def test_an_endless_query_is_cut_by_steps_and_by_the_clock() -> None:
    with pytest.raises(QueryError, match="took too long"):
        execute("generated:music/1", ENDLESS, max_seconds=60)
    with pytest.raises(QueryError, match="took too long"):
        execute("generated:music/1", ENDLESS, max_steps=10**12, max_seconds=0.05)


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("SELECT nme FROM singer", "no such column: nme"),
        ("SELECT name FROM singer a, singer b, singer c, singer d", "ambiguous column name: name"),
        ("SELECT a.name FROM singer a, singer b, singer c", "too many rows"),
        ("SELECT hex(zeroblob(100000000))", "string or blob too big"),
        ("SELECT " + "x" * 500, "no such column: x{64}"),
    ],
)
def test_errors_are_short(sql: str, error: str) -> None:
    with pytest.raises(QueryError, match=f"^{error}") as caught:
        execute("generated:music/1", sql)
    assert len(str(caught.value)) <= 80


def test_many_threads_execute_at_once() -> None:
    work = [task for task in tasks.train()[:64] for _ in range(4)]
    with ThreadPoolExecutor(32) as pool:
        right = pool.map(lambda t: execution_match(t["databases"], t["sql"], t["sql"], ordered=t["ordered"]), work)
        broken = pool.map(lambda _: _runs("generated:music/1", ENDLESS), range(2))
        assert all(right)
        assert not any(broken)


@pytest.mark.parametrize(
    ("rows", "wanted", "ordered", "same"),
    [
        ([(1,), (2,)], [(2,), (1,)], False, True),
        ([(1,), (2,)], [(2,), (1,)], True, False),
        ([(1,), (1,)], [(1,)], False, False),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),
        ([(0.1 + 0.2,)], [(0.3,)], False, True),
        ([(2,)], [(2.0,)], False, True),
        ([("2",)], [(2,)], False, False),
        ([("a", 1), ("b", 2)], [(1, "a"), (2, "b")], True, True),
        ([("a", 1), (2, "b")], [(1, "a"), (2, "b")], False, False),
        ([("a", 1)], [("a",)], False, False),
        ([], [], False, True),
        ([], [(1,)], False, False),
        ([(None,)], [(None,)], False, True),
    ],
)
def test_results_are_compared_as_multisets(rows: list, wanted: list, ordered: bool, same: bool) -> None:
    assert same_result(rows, wanted, ordered=ordered) is same


# --- the program


class Model:
    """An OpenAI-compatible server that answers from a script by agent."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str]] = {"writer": [], "checker": [], "rewriter": []}
        self.requests: list[tuple[str, list[dict[str, str]], dict[str, Any]]] = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(model.answer(body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        messages = body["messages"]
        who = (
            "checker" if "wrong" in messages[0]["content"] else "rewriter" if self.answers["writer"] == [] else "writer"
        )
        self.requests.append((who, messages, body))
        message = {"role": "assistant", "content": self.answers[who].pop(0)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    model = Model()
    monkeypatch.setenv("OPENAI_BASE_URL", model.url)
    agent.client.cache_clear()
    yield model
    agent.client.cache_clear()
    model.server.shutdown()
    model.server.server_close()


def test_a_query_that_runs_ends_the_program(model: Model) -> None:
    task = tasks.train()[0]
    model.answers["writer"] = [f"```sql\n{task['sql']};\n```\nThis query ..."]
    assert agent.solve(task) == 1.0
    assert [who for who, _, _ in model.requests] == ["writer"]
    _, messages, body = model.requests[0]
    assert messages[-1]["content"] == task["question"]
    assert task["schema"] in messages[1]["content"]
    assert len(messages) == 2 + 2 * len(task["examples"])
    assert body.get("max_completion_tokens", body.get("max_tokens")) == 128


def test_a_wrong_query_that_runs_is_not_questioned(model: Model) -> None:
    model.answers["writer"] = ["SELECT 1"]
    assert agent.solve(tasks.train()[0]) == 0.0
    assert len(model.requests) == 1


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ("SELECT age FROM nowhere", "no such table: nowhere"),
        ("I cannot.", "not a SELECT"),
        ("SELECT 1 WHERE 1 = 2", "no rows"),
        ("SELECT MAX(1) WHERE 1 = 2", "only NULL"),
    ],
)
def test_a_failed_query_goes_to_checker_and_rewriter(model: Model, first: str, problem: str) -> None:
    task = tasks.train()[0]
    model.answers = {"writer": [first], "checker": ["The table is wrong."], "rewriter": [task["sql"]]}
    assert agent.solve(task) == 1.0
    assert [who for who, _, _ in model.requests] == ["writer", "checker", "rewriter"]
    (_, written, _), (_, checked, _), (_, rewritten, _) = model.requests
    assert checked[-1]["content"] == f"{first}\n{problem}"
    assert rewritten[:-1] == written[:-1]
    assert rewritten[-1]["content"] == f"{problem}. The table is wrong.\n{task['question']}"


def test_the_program_ends_after_two_queries(model: Model) -> None:
    model.answers = {"writer": ["SELECT x"], "checker": ["Wrong."], "rewriter": ["SELECT y"]}
    assert agent.solve(tasks.train()[0]) == 0.0
    assert len(model.requests) == 3


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("SELECT a\n  FROM b;", "SELECT a FROM b"),
        ("SQL: select 1; select 2", "select 1"),
        ("```sql\nSELECT 1\n```", "SELECT 1"),
        ("SELECT 1\n\nIt counts.", "SELECT 1"),
        ("WITH x AS (SELECT 1) SELECT * FROM x", "WITH x AS (SELECT 1) SELECT * FROM x"),
        ("no idea", "no idea"),
    ],
)
def test_the_query_is_found_in_an_answer(text: str, query: str) -> None:
    assert agent.extract_query(text) == query
