"""Kinds of tools of four frameworks: what they return from the record is what they returned, and their bodies do not run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from autogen_core import CancellationToken
from autogen_core.tools import FunctionTool
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolCallId, ToolException, tool
from langgraph.graph import START, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode
from langgraph.types import Command
from pydantic import BaseModel

from lightning_core.capture import rollout
from lightning_core.capture.integration import Installed
from lightning_core.signals.forks.tool_results import RESULT, RecordedTool, ToolResults
from lightning_core.trace import Trace

_numbers = itertools.count()


def repeated(trace: Trace, names: frozenset[str]) -> ToolResults:
    """All results of ``trace``."""
    recorded = [
        RecordedTool(id=e.id, attributes=e.attributes, result=e.attributes[RESULT], error=e.error, calls=frozenset())
        for e in trace.events
        if RESULT in e.attributes
    ]
    return ToolResults(names=names, recorded=recorded)


def twice(work: Callable[[], Any], name: str, integration: str) -> tuple[Any, Any]:
    """What ``work`` returned, and what it returned when its tool ``name`` gave the recorded results."""
    with Installed().installed(integration):
        with rollout({}, tools=ToolResults(names=frozenset({name}))()) as run:
            first = work()
        assert [e.name for e in run.trace.events if RESULT in e.attributes] == [name]
        with rollout({}, tools=repeated(run.trace, frozenset({name}))()) as again:
            second = work()
    assert sum("lightning.replays" in e.attributes for e in again.trace.events) == 1
    kept = [[(e.error, e.attributes) for e in t.events if e.kind == "tool"] for t in (run.trace, again.trace)]
    differing = {"lightning.replays"}
    assert [{k: v for k, v in a.items() if k not in differing} for _, a in kept[0]] == [
        {k: v for k, v in a.items() if k not in differing} for _, a in kept[1]
    ]
    assert [error for error, _ in kept[0]] == [error for error, _ in kept[1]]
    return first, second


# LangChain and LangGraph


@tool(response_format="content_and_artifact")
def with_artifact(a: int) -> tuple[str, dict[str, int]]:
    """Returns an artifact."""
    number = next(_numbers)
    return f"found {number}", {"number": number}


@tool
def with_config(a: int, config: RunnableConfig) -> str:
    """Reads the configuration."""
    return f"{config.get('metadata', {})['x']} {next(_numbers)}"


@tool
def failing(a: int) -> str:
    """Fails."""
    raise ToolException(f"no {next(_numbers)}")


failing.handle_tool_error = True


@tool
def commanding(
    a: int, call_id: Annotated[str, InjectedToolCallId], state: Annotated[Any, InjectedState]
) -> Command[Any]:
    """Returns a command."""
    return Command(update={"messages": [ToolMessage(f"{state['user']} {next(_numbers)}", tool_call_id=call_id)]})


class OwnTool(BaseTool):
    """A class with a synchronous body only."""

    name: str = "own"
    description: str = "A class."
    runs: int = 0

    def _run(self, a: int, run_manager: Any = None) -> str:
        self.runs += 1
        return f"{next(_numbers)} {run_manager is not None}"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["invoke", "ainvoke"])
@pytest.mark.parametrize("one", [with_artifact, with_config, failing, OwnTool()], ids=lambda one: one.name)
def test_langchain_tools_return_the_same_message(one: BaseTool, asynchronous: bool) -> None:
    ends: list[Any] = []

    class Handler(BaseCallbackHandler):
        def on_tool_end(self, output: Any, **_: Any) -> None:
            ends.append(output)

    call: Any = {"name": one.name, "args": {"a": 1}, "id": "call_1", "type": "tool_call"}
    config: Any = {"callbacks": [Handler()], "metadata": {"x": "y"}}

    def work() -> Any:
        return asyncio.run(one.ainvoke(call, config)) if asynchronous else one.invoke(call, config)

    first, second = twice(work, one.name, "langchain")
    assert first == second
    assert first.artifact == second.artifact
    assert ends == [first, second], "callbacks run as they did"
    if isinstance(one, OwnTool):
        assert one.runs == (2 if asynchronous else 1), "the tool's own body, once for each kind of run"


def test_a_tool_that_returns_a_command_does_so_again() -> None:
    def work() -> Any:
        call = {"name": "commanding", "args": {"a": 1}, "id": "call_1", "type": "tool_call"}
        message: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
        return asyncio.run(_run_node({"messages": [message], "user": "me"}))

    first, second = twice(work, "commanding", "langgraph")
    assert first == second
    (message,) = second[0].update["messages"]
    assert message.content.startswith("me ")


async def _run_node(given: Any) -> Any:
    class State(BaseModel):
        messages: list[Any]
        user: str

    node = ToolNode([commanding])
    graph = StateGraph(State)
    found: list[Any] = []

    async def run(state: State) -> Any:
        calls = state.messages[0]["tool_calls"]
        result = await node.ainvoke({"messages": [AIMessage("", tool_calls=calls)], "user": state.user})
        found.extend(result)
        return {}

    graph.add_node("run", run)
    graph.add_edge(START, "run")
    await graph.compile().ainvoke(given)
    return found


# AutoGen


class Place(BaseModel):
    name: str
    number: int


def test_an_autogen_tool_that_code_runs_returns_the_same_object() -> None:
    async def find(name: str) -> Place:
        return Place(name=name, number=next(_numbers))

    function = FunctionTool(find, description="Finds a place.")
    first, second = twice(
        lambda: asyncio.run(function.run_json({"name": "Oslo"}, CancellationToken())), "find", "autogen-agentchat"
    )
    assert first == second
    assert isinstance(second, Place)


def test_an_autogen_tool_that_raises_does_so_again() -> None:
    async def find(name: str) -> str:
        raise LookupError(f"{name} {next(_numbers)}")

    function = FunctionTool(find, description="Finds a place.")

    def work() -> str:
        with pytest.raises(LookupError) as raised:
            asyncio.run(function.run_json({"name": "Oslo"}, CancellationToken()))
        return str(raised.value)

    first, second = twice(work, "find", "autogen-agentchat")
    assert first == second
