"""Two sub-graphs whose nodes have the same name, selected by their paths."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph

from tests.integrations.identity.chat_models import chat_model
from tests.integrations.identity.rollouts import Calls, Program

PATHS = ("left/writer", "right/writer")


class State(TypedDict):
    prompts: dict[str, list[str]]
    done: Annotated[list[str], operator.add]


def _team(model: ChatOpenAI, path: str) -> Any:
    async def writer(state: State) -> dict[str, Any]:
        await asyncio.gather(*(model.ainvoke(prompt) for prompt in state["prompts"][path][::2]))
        return {"done": [path]}

    def write_in_a_thread(state: State) -> dict[str, Any]:
        for prompt in state["prompts"][path][1::2]:
            model.invoke(prompt)
        return {"done": [path]}

    inner = StateGraph(State)
    inner.add_node("writer", writer)
    inner.add_edge(START, "writer")
    outer = StateGraph(State)
    outer.add_node("writer", write_in_a_thread)
    outer.add_node("team", inner.compile())
    outer.add_edge(START, "team")
    outer.add_edge("team", "writer")
    return outer.compile()


@contextmanager
def sub_graphs(url: str) -> Generator[Program]:
    """A graph compiled once, whose teams work at the same time."""
    model = chat_model(url)
    builder = StateGraph(State)
    for path in PATHS:
        team = path.partition("/")[0]
        builder.add_node(team, _team(model, path))
        builder.add_edge(START, team)
    graph = builder.compile()

    async def program(calls: Calls) -> None:
        prompts = {path: calls.prompts(path) for path in PATHS}
        try:
            await graph.ainvoke({"prompts": prompts, "done": []})
        except Exception:  # noqa: BLE001 - an error is loud; which of the calls it concerns shows in the trace
            calls.failed += [prompt for own in prompts.values() for prompt in own]

    yield program
