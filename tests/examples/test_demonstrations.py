"""Gold answers become traces of the real agents, over real HTTP: names, messages and rewards, for each example with a data set."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from examples import demonstrations
from examples.math_tool import agent as math_agent
from examples.math_tool import word_problems
from examples.rag import agent as rag_agent
from examples.rag import multihop, multihop_agent
from examples.text_to_sql import agent as sql_agent
from examples.text_to_sql import spider
from lightning_core.otel import read_traces
from lightning_core.trace import Call, Trace

CONFIG = Path(math_agent.__file__).with_name("word_problems.yaml")
PROBLEMS = [
    {"ID": "a", "Body": "Ed had 9 pens.", "Question": "He lost 4. How many has he?", "Equation": "( 9.0 - 4.0 )"},
    {"ID": "b", "Body": "Ed has 3 pens.", "Question": "A half is how many?", "Equation": "( 3.0 / 2.0 )"},
]
PASSAGES = {
    "Green (song)": "Green is a song by Ana Lund.",
    "Ana Lund": "Ana Lund was born in Oslo.",
    "Red (song)": "Red is a song by Bo Holm.",
    "Bo Holm": "Bo Holm was born in Bergen.",
}


@pytest.fixture(autouse=True)
def _clients() -> Iterator[None]:
    """The agents' cached clients belong to the event loop that used them first."""
    cached = (math_agent.client, rag_agent.researcher, sql_agent.client)
    for client in cached:
        client.cache_clear()
    yield
    for client in cached:
        client.cache_clear()


def _record(
    path: Path,
    solve: Callable[[Any], Any],
    tasks: Sequence[Mapping[str, Any]],
    respond: demonstrations.Respond,
    train: Sequence[str],
) -> dict[str, Trace]:
    """The recorded traces by task id. All tasks earn 1."""
    rewards = asyncio.run(demonstrations.record(solve, tasks, respond, train, path))
    assert len(path.read_text().splitlines()) == len(rewards) == len(tasks)
    traces = {trace.task_id: trace for trace in read_traces(path)}
    assert rewards == [traces[task["id"]].reward for task in tasks] == [1.0] * len(tasks)
    return traces


def _contents(call: Call) -> list[str]:
    assert call.response is not None
    return [str(message["content"]) for message in (*call.messages, call.response)]


def _write_problems(folder: Path) -> None:
    answers = (5.0, 1.5)
    items = [item | {"Answer": answer} for item, answer in zip(PROBLEMS, answers, strict=True)]
    (folder / "SVAMP.json").write_text(json.dumps(items))


def test_the_writer_gives_the_gold_query(tmp_path: Path) -> None:
    path = tmp_path / "database" / "pets" / "pets.sqlite"
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE Owner (Name TEXT); INSERT INTO Owner VALUES ('Ana'), ('Bo');")
    schema = {
        "db_id": "pets",
        "table_names_original": ["Owner"],
        "table_names": ["owner"],
        "column_names_original": [[-1, "*"], [0, "Name"]],
        "column_names": [[-1, "*"], [0, "name"]],
        "column_types": ["text", "text"],
        "primary_keys": [],
        "foreign_keys": [],
    }
    (tmp_path / "tables.json").write_text(json.dumps([schema]))
    queries = {
        "How many owners?": "SELECT count(*)  FROM Owner",
        "Names in order?": "SELECT Name FROM Owner ORDER BY 1;",
    }
    items = [{"db_id": "pets", "question": question, "query": sql} for question, sql in queries.items()]
    (tmp_path / "dev.json").write_text(json.dumps(items))

    tasks = spider.test(str(tmp_path))
    train = ["writer", "rewriter"]
    traces = _record(tmp_path / "gold.jsonl", sql_agent.solve, tasks, spider.gold_response, train)

    assert {name: [call.agent for call in trace.calls] for name, trace in traces.items()} == {
        "dev-0000": ["writer"],
        "dev-0001": ["writer"],
    }
    assert [_contents(traces[name].calls[0])[1:] for name in ("dev-0000", "dev-0001")] == [
        ["Tables: Owner(Name)\nHow many owners?", "SELECT count(*) FROM Owner;"],
        ["Tables: Owner(Name)\nNames in order?", "SELECT Name FROM Owner ORDER BY 1;"],
    ]


@pytest.mark.parametrize("shown", ["none", "one-operation"])
def test_the_calculator_is_called_with_the_gold_expression(tmp_path: Path, shown: math_agent.Shown) -> None:
    _write_problems(tmp_path)
    tasks = word_problems.test(str(tmp_path), examples=shown)
    respond, train = word_problems.gold_response, [math_agent.NAME]
    traces = _record(tmp_path / "gold.jsonl", math_agent.solve, tasks, respond, train)

    for name, expression, answer in (("a", "9-4", "5"), ("b", "3/2", "1.5")):
        first, second = traces[name].calls
        assert first.agent == second.agent == math_agent.NAME
        assert len(first.messages) == 2 + 4 * len(math_agent.EXAMPLES[shown])
        assert first.response is not None
        (call,) = first.response["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "calculator",
            {"expression": expression},
        )
        assert _contents(second)[-2:] == [answer, answer]  # the tool's result and the response


def test_calculations_of_several_steps_are_called_in_order(tmp_path: Path) -> None:
    solution = "In May 48/2 = <<48/2=24>>24 clips, and 48+24 = <<48+24=1,072>>72 in all.\n#### 72"
    (tmp_path / "test.jsonl").write_text(json.dumps({"id": "a", "question": "How many clips?", "answer": solution}))
    tasks = word_problems.test(str(tmp_path), examples="two-operations")
    respond, train = word_problems.gold_response, [math_agent.NAME]
    trace = _record(tmp_path / "gold.jsonl", math_agent.solve, tasks, respond, train)["a"]
    assert [_contents(call)[-1] for call in trace.calls][-1] == "72"
    assert [_contents(call)[-2] for call in trace.calls][1:] == ["24", "72"]


@pytest.mark.parametrize("examples", [False, True])
def test_the_researcher_searches_the_titles_in_order(tmp_path: Path, examples: bool) -> None:
    questions = [
        {
            "id": color,
            "question": f"Where was the singer of {color} born?",
            "answer": answer,
            "aliases": [],
            "type": "2hop",
            "supporting_titles": [singer, f"{color} (song)"],  # not in the order of the searches
        }
        for color, singer, answer in (("Green", "Ana Lund", "Oslo"), ("Red", "Bo Holm", "Bergen"))
    ]
    (tmp_path / "dev.jsonl").write_text("\n".join(map(json.dumps, questions)))
    lines = [json.dumps({"title": title, "text": text}) for title, text in PASSAGES.items()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))

    tasks = multihop.test([str(tmp_path)], subset="two-search", examples=examples)
    respond, train = multihop.gold_response, ["researcher"]
    traces = _record(tmp_path / "gold.jsonl", multihop_agent.solve, tasks, respond, train)

    for color, singer, answer in (("Green", "Ana Lund", "Oslo"), ("Red", "Bo Holm", "Bergen")):
        calls = traces[color].calls
        assert [call.agent for call in calls] == ["researcher"] * 3
        assert len(calls[0].messages) == 2 + examples * len(multihop_agent.EXAMPLES)
        assert _contents(calls[-1])[-6:] == [
            f"Where was the singer of {color} born?",
            f"Search: {color}",
            f"{color} (song): {PASSAGES[f'{color} (song)']}",
            f"Search: {singer}",
            f"{singer}: {PASSAGES[singer]}",
            f"Answer: {answer}",
        ]


def test_a_task_that_fails_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent raises for one, `respond` for another, which a client sees as an error of the server."""
    client = OpenAI(api_key="any", max_retries=0)

    def solve(task: Mapping[str, Any]) -> float:
        if task["id"] == "a":
            raise RuntimeError("no such table")
        reply = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": str(task["id"])}])
        return float(reply.choices[0].message.content == "gold")

    def respond(task: Mapping[str, Any], prompt: str) -> str:
        return None if task["id"] == "b" else "gold"  # type: ignore[return-value]

    out = tmp_path / "gold.jsonl"
    rewards = asyncio.run(demonstrations.record(solve, [{"id": name} for name in "abc"], respond, ["solver"], out))
    assert rewards == [1.0]
    assert [trace.task_id for trace in read_traces(out)] == ["c"]
    errors = capsys.readouterr().err
    assert "task 'a' is left out: RuntimeError: no such table" in errors
    assert "task 'b' is left out: " in errors
    assert "expected text" in errors


def test_the_command_records_the_last_tasks_of_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_problems(tmp_path)
    out = tmp_path / "gold.jsonl"
    arguments = [
        "tasks.train.source=examples.math_tool.word_problems:test",
        f"tasks.train.args={{folder: {tmp_path}, operations: 1, examples: none}}",
    ]
    respond = "examples.math_tool.word_problems:gold_response"
    monkeypatch.setattr(sys, "argv", ["demonstrations", str(CONFIG), respond, str(out), "--last", "1", *arguments])
    demonstrations.main()
    assert capsys.readouterr().out == f"1 of 1 tasks solved; traces in {out}\n"
    (trace,) = read_traces(out)
    last = word_problems.test(str(tmp_path))[-1]
    assert (trace.task_id, trace.reward, trace.agents) == (last["id"], 1.0, (math_agent.NAME,))
