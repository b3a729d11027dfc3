"""The AutoGen example without a model: the tool only calculates, held-out tasks, formats, and the agent's turns."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from examples.math_tool import agent, calc_x, tasks
from examples.math_tool.calculator import calculator
from lightning_core import load_config, trace_to_transitions, transitions_to_rows
from lightning_core.errors import ConfigError
from lightning_core.rollouts.tasks import load_tasks
from lightning_core.testing import playground
from lightning_core.trace import Trace

CONFIG = Path(agent.__file__).with_name("lightning.yaml")


# --- the tool


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*34", "408"),
        ("12*34+5", "413"),
        ("(2+3)*-4", "-20"),
        ("1254/19", "66"),
        ("10/4", "2.5"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.3333333333"),
        (" 7 ", "7"),
        ("99999999999999999999*9", "899999999999999999991"),
        ("-" * 79 + "1", "-1"),
    ],
)
def test_the_tool_calculates(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2**9999",
        "1<<9",
        "9//2",
        "1/0",
        "1e308*10",
        "1e999",
        "1e999-1e999",
        "True+1",
        "1j",
        "'a'*9",
        "x",
        "__import__('os').system('true')",
        "().__class__",
        "[1 for _ in (1,)]",
        "lambda: 1",
        "1\n2",
        "56+27=",
        "\x00",
        "(" * 79 + "1",
        "1+" * 60 + "1",
    ],
)
def test_the_tool_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"calculate|longer|null"):
        calculator(expression)


# --- the reward


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("408", 408, True),
        (" 408.\n", 408, True),
        ("408.0", 408, True),
        ("0.3333333333", 1 / 3, True),
        ("409", 408, False),
        ("-408", 408, False),
        ("408 hats", 408, False),
        ("407 408", 408, False),
        ("The answer is 408", 408, False),
        ("", 408, False),
        ("nan", 408, False),
        ("inf", 408, False),
    ],
)
def test_an_answer_is_the_number_alone(answer: str, expected: float, right: bool) -> None:
    assert agent.is_right(answer, expected) is right


# --- the tasks


def _numbers(task: dict[str, Any]) -> set[int]:
    """The numbers that the problem calculates with; for a division its result and its divisor."""
    numbers = [int(n) for n in re.findall(r"\d+", task["expression"])]
    return {task["answer"], numbers[1]} if "/" in task["expression"] else set(numbers)


def test_the_splits_share_no_question_no_pair_of_numbers_and_no_person() -> None:
    train, test = tasks.train(), tasks.test()
    assert (len(train), len(test)) == (2000, 200)
    for parts in (
        lambda task: [task["question"]],
        lambda task: combinations(sorted(_numbers(task)), 2),
        lambda task: re.findall(r"Tom|Ana|Ben|Mia|Sam|Lea|Max|Zoe|Eva|Leo|Kim|Ida", task["question"]),
    ):
        one, other = ({part for task in split for part in parts(task)} for split in (train, test))
        assert one
        assert other
        assert not one & other
    shown = {question for question, _, _ in agent.EXAMPLES["templates"]}
    assert not shown & {task["question"] for task in (*train, *test)}
    assert train == tasks.train()


def test_every_answer_is_what_its_expression_gives_from_numbers_in_the_question() -> None:
    for task in (*tasks.train(), *tasks.test()):
        assert calculator(task["expression"]) == str(task["answer"])
        assert task["answer"] > 0
        assert sorted(re.findall(r"\d+", task["expression"])) == sorted(re.findall(r"\d+", task["question"]))
        assert len(re.findall(r"[-+*/]", task["expression"])) == 1


def test_the_examples_are_right() -> None:
    for _, expression, result in agent.EXAMPLES["templates"]:
        assert calculator(expression) == result


# --- Calc-X


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_calc_x_is_read(tmp_path: Path) -> None:
    chain = (
        'Two steps: <gadget id="calculator">12 * 4</gadget>\n<output>48</output> and\n'
        '<gadget id="calculator">48 / 5</gadget><output>9.6</output>\n<result>9.6</result>'
    )
    file = _write(
        tmp_path / "calc_x.jsonl",
        [
            {"id": "ape__1", "question": "A?", "chain": chain, "result": "9_3/5", "result_float": 9.6},
            {"id": "gsm__2", "question": "B?", "chain": chain},
            {"id": "none__3", "question": "C?", "chain": "no idea"},
        ],
    )
    steps = [["12 * 4", "48"], ["48 / 5", "9.6"]]
    assert calc_x.read(file) == [
        {"id": "ape__1", "question": "A?", "steps": steps, "answer": 9.6},
        {"id": "gsm__2", "question": "B?", "steps": steps, "answer": 9.6},
    ]


def test_question_and_result_are_enough(tmp_path: Path) -> None:
    file = _write(
        tmp_path / "math.jsonl",
        [{"question": q, "result": r} for q, r in [("A?", "1,200"), ("B?", "x+1"), ("C?", 7), ("D?", "3/4")]],
    )
    source = load_config(
        {
            "policy": {"model": "m"},
            "tasks": {"train": {"source": "examples.math_tool.calc_x:read", "args": {"file": file}}},
        }
    ).tasks.train
    assert source is not None
    assert [(t["question"], t["answer"]) for t in load_tasks(source)] == [("A?", 1200.0), ("C?", 7.0), ("D?", 0.75)]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        calc_x.read(str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12.0),
        ("-1_1/2", -1.5),
        ("1 1/2", 1.5),
        ("3/0", None),
        ("\\frac{1}{2}", None),
        ("12%", None),
        ("", None),
        ("nan", None),
    ],
)
def test_numbers_are_read_as_these_sets_write_them(text: str, number: float | None) -> None:
    assert calc_x.parse_number(text) == number


# --- the agent, over real HTTP against a script


def _play(task: dict[str, Any], *turns: str) -> tuple[float, Trace]:
    """Solve ``task`` with a model that responds with ``turns``, with the agent selected by its name."""
    agent.client.cache_clear()  # its connections belong to the event loop of the last test
    with playground(turns, train=[agent.NAME], task=task, integrations=["autogen-agentchat"]) as run:
        earned = asyncio.run(agent.solve(task))
    agent.client.cache_clear()
    return earned, run.trace


def _call(expression: str) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


TASK = {"question": "Kim has 2 boxes of 30 pens, and 4 more. How many pens?", "answer": 64}


def test_two_calls_and_the_answer_are_one_row_of_the_agent() -> None:
    earned, trace = _play(TASK, _call("2*30"), _call("60+4"), "64")
    assert earned == 1.0
    assert [call.agent for call in trace.calls] == ["calc_agent"] * 3
    assert [call.context for call in trace.calls] == ["new", "clean", "clean"]
    used = [event.attributes["gen_ai.tool.call.result"] for event in trace.events if event.kind == "tool"]
    assert used == ["60", "64"]
    (row,) = transitions_to_rows(trace_to_transitions(trace, agents={"calc_agent"}))
    assert row.mask.sum() == sum(len(call.output_ids) for call in trace.calls if call.output_ids is not None)
    assert trace.calls[0].messages[-1]["content"] == agent.user_message(TASK["question"])


@pytest.mark.parametrize(
    ("turns", "earned"),
    [
        ([_call("2*30+4"), "64."], 1.0),
        (["64"], 1.0),
        ([_call("2*30"), "60"], 0.0),
        ([_call("2*30+4"), "There are 64 pens."], 0.0),
        ([_call("__import__('os')"), "64"], 1.0),
        ([_call("2*30+4"), _call("64"), _call("64")], 0.0),
        (["<tool_call>{broken"], 0.0),
        (['<tool_call>{"name": "abacus", "arguments": {}}</tool_call>', "64"], 1.0),
    ],
)
def test_the_reward_is_for_the_last_message(turns: list[str], earned: float) -> None:
    got, trace = _play(TASK, *turns)
    assert got == earned
    assert len(trace.calls) == len(turns)


def test_the_configuration_fits_the_program() -> None:
    config = load_config(CONFIG, needs=("agent", "tasks.train", "tasks.eval"))
    assert config.agents.train == (agent.NAME,)
    assert config.tasks.eval is not None
    assert load_tasks(config.tasks.eval) == tasks.test()
