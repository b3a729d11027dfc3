"""LangGraph: the contract, and what only graphs have."""

from __future__ import annotations

import asyncio
import inspect
import operator
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import ToolException, tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, Send, interrupt

from lightning_core.errors import ConfigError
from lightning_core.integration import Installed
from lightning_core.trainable import trainable
from tests.conftest import Endpoint
from tests.integrations.contract import ADD, Adapter, Contract, Part, ancestors, parent_of, says


class State(TypedDict):
    said: Annotated[list[str], operator.add]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers that are not negative."""
    if b < 0:
        raise ToolException("b is negative")
    return a + b


add.handle_tool_error = True


def chat_model(base_url: str | None = None) -> ChatOpenAI:
    return ChatOpenAI(model="policy", api_key="sk-of-the-agent", base_url=base_url, max_retries=0)


class LangGraphAdapter(Adapter):
    """Every part a node with a function: sync and async ones, since LangGraph runs either kind."""

    integration = "langgraph"
    host = "langgraph"

    def build(self, parts: Sequence[Part], *, parallel: bool = False, base_url: str | None = None) -> Any:
        graph = StateGraph(State)
        for part in parts:
            graph.add_node(part.name, self.make_node(part, base_url))
        edges = [(START, part.name) for part in parts]
        if not parallel:
            edges = list(zip([START, *(p.name for p in parts)], [p.name for p in parts], strict=False))
        for edge in edges:
            graph.add_edge(*edge)
        return graph.compile()

    def make_node(self, part: Part, base_url: str | None) -> Any:
        model = chat_model(base_url)
        agent = create_agent(model, [add]) if part.tool else None
        inner = self.build([part.inner], base_url=base_url) if part.inner else None
        messages = [HumanMessage(part.text)]

        def run(state: State) -> State:
            if agent is not None:
                agent.invoke({"messages": messages})
            else:
                model.invoke(messages)
            if inner is not None:
                inner.invoke({"said": []})
            if part.error is not None:
                raise part.error
            return {"said": [part.name]}

        async def arun(state: State) -> State:
            if agent is not None:
                await agent.ainvoke({"messages": messages})
            else:
                await model.ainvoke(messages)
            if inner is not None:
                await inner.ainvoke({"said": []})
            if part.error is not None:
                raise part.error
            return {"said": [part.name]}

        if part.marked:
            return RunnableLambda(trainable(part.name)(run), trainable(part.name)(arun))
        return RunnableLambda(run, arun)

    def run(self, program: Any) -> None:
        program.invoke({"said": []})

    async def arun(self, program: Any) -> None:
        await program.ainvoke({"said": []})

    def stream(self, program: Any) -> None:
        assert list(program.stream({"said": []}, stream_mode=["messages", "updates"]))

    async def astream(self, program: Any) -> None:
        assert [chunk async for chunk in program.astream({"said": []}, stream_mode=["messages", "updates"])]

    def patched_call(self) -> tuple[Any, str]:
        import langgraph.pregel._runner as runner

        return runner, "run_with_retry"


class TestLangGraph(Contract):
    adapter = LangGraphAdapter()
