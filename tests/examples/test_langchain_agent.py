"""The LangChain example without a model: held-out tasks, the tool's results, and the agent's turns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.langchain_agent import agent, tasks
from examples.langchain_agent.catalogue import COLUMNS, catalogue
from lightning_core import load_config, trace_to_transitions, trainable, transitions_to_rows
from lightning_core.rollouts.tasks import load_tasks
from lightning_core.testing import playground
from lightning_core.trace import Trace

CONFIG = Path(agent.__file__).with_name("lightning.yaml")
TASK = {"question": "Where do I find the paper lamp?", "answer": catalogue()["paper lamp"]["shelf"]}


# --- the tasks


def test_the_splits_share_no_item_and_the_examples_items_are_in_neither() -> None:
    train, test = ({task["item"] for task in split()} for split in (tasks.train, tasks.test))
    assert not train & test
    assert not set(tasks.SHOWN) & (train | test)
    assert {item for _, item, _ in agent.EXAMPLES} == set(tasks.SHOWN)
    assert train | test | set(tasks.SHOWN) == set(catalogue())
    assert tasks.train() == tasks.train()


def test_every_question_names_its_item_and_has_the_catalogues_answer() -> None:
    for task in (*tasks.train(), *tasks.test()):
        assert task["item"] in task["question"]
        assert task["answer"] == catalogue()[task["item"]][task["column"]]
    assert set(Counter(task["column"] for task in tasks.test()).values()) == {len(tasks.test()) // len(COLUMNS)}


def test_no_column_has_another_columns_value() -> None:
    assert all(len(set(row.values())) == len(COLUMNS) for row in catalogue().values())


def test_a_wording_is_used_for_one_column_only() -> None:
    columns_by_question: dict[str, set[str]] = {}
    for task in (*tasks.train(), *tasks.test()):
        columns_by_question.setdefault(task["question"].replace(task["item"], "…"), set()).add(task["column"])
    assert len(columns_by_question) == 16
    assert all(len(columns) == 1 for columns in columns_by_question.values())


# --- the tool


@pytest.mark.parametrize(
    ("item", "column", "found"),
    [
        ("paper lamp", "price", catalogue()["paper lamp"]["price"]),
        ("paper lamp", "maker", catalogue()["paper lamp"]["maker"]),
        ("paper", "price", "there is no item 'paper'"),
        ("paper lamp", "cost", "there is no column 'cost', only price, stock, shelf, maker"),
    ],
)
def test_the_tool_finds_what_there_is(item: str, column: str, found: str) -> None:
    assert agent.look_up.invoke({"item": item, "column": column}) == found


# --- the agent, over real HTTP against a script


def _play(*turns: str, integration: bool = True) -> tuple[float, Trace]:
    """Solve `TASK` with a model that responds with ``turns``, with the agent selected by its name or by a mark."""
    solve = agent.solve if integration else trainable("clerk")(agent.solve)
    integrations = ["langgraph"] if integration else []
    with playground(turns, train=["clerk"], task=TASK, integrations=integrations) as run:
        earned = solve(TASK)
    return earned, run.trace


def _call(**arguments: Any) -> str:
    written = ", ".join(f'"{name}": "{value}"' for name, value in arguments.items())
    return f'<tool_call>{{"name": "look_up", "arguments": {{{written}}}}}</tool_call>'


def test_the_look_up_and_the_answer_are_one_row_of_the_agent() -> None:
    earned, trace = _play(_call(item="paper lamp", column="shelf"), TASK["answer"])
    assert earned == 1.0
    assert [call.agent for call in trace.calls] == ["clerk", "clerk"]
    assert [e.attributes["gen_ai.tool.call.result"] for e in trace.events if e.kind == "tool"] == [TASK["answer"]]
    (row,) = transitions_to_rows(trace_to_transitions(trace, agents={"clerk"}))
    assert row.mask.sum() == sum(len(call.output_ids) for call in trace.calls if call.output_ids is not None)
    assert trace.calls[0].messages[-1]["content"] == agent.user_message(TASK["question"])


def test_without_the_integration_the_handler_still_records_the_tool() -> None:
    earned, trace = _play(_call(item="paper lamp", column="shelf"), TASK["answer"], integration=False)
    assert earned == 1.0
    (used,) = [event for event in trace.events if event.kind == "tool"]
    assert (used.name, used.attributes["gen_ai.tool.call.result"]) == ("look_up", TASK["answer"])
    assert [call.agent for call in trace.calls] == ["clerk", "clerk"]


@pytest.mark.parametrize(
    ("turns", "earned"),
    [
        ([_call(item="paper lamp", column="place"), _call(item="paper lamp", column="shelf"), TASK["answer"]], 1.0),
        ([_call(item="paper lamp", column="shelf"), f"{TASK['answer']}."], 1.0),
        ([_call(item="paper lamp", column="shelf"), f"On {TASK['answer']}"], 0.0),
        ([_call(item="paper lamp", column="price"), catalogue()["paper lamp"]["price"]], 0.0),
        ([_call(item="paper lamp", column="shelf")] * 3, 0.0),
        ([_call(item="paper lamp"), "A9 or A8"], 0.0),
        (["<tool_call>{broken"], 0.0),
    ],
)
def test_the_reward_is_for_the_last_message(turns: list[str], earned: float) -> None:
    got, trace = _play(*turns)
    assert got == earned
    assert len(trace.calls) == len(turns)


def test_the_configuration_fits_the_program() -> None:
    config = load_config(CONFIG, needs=("agent", "tasks.train", "tasks.eval"))
    assert config.agents.train == (agent.clerk().name,)
    assert config.tasks.eval is not None
    assert load_tasks(config.tasks.eval) == tasks.test()
