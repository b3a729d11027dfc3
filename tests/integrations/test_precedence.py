"""Integrations whose hosts use each other: with all of them installed, every call and tool is recorded once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from openai import AsyncOpenAI

from lightning_core import Trace
from lightning_core.capture.integration import Installed, active_integrations, discover, installed
from lightning_core.capture.patching import Patches
from lightning_core.testing import Playground
from lightning_core.testing.contract import ADD_PROMPT, run_async
from lightning_langchain import LightningCallbackHandler
from tests.integrations.runnables import run_runnable


@pytest.fixture
def everything() -> Iterator[None]:
    with installed(*discover()):
        yield


def seen(trace: Trace) -> tuple[list[str | None], Counter[tuple[str, str]]]:
    kinds = Counter((event.kind, event.name) for event in trace.events if event.kind in ("agent", "node", "tool"))
    return [call.agent for call in trace.calls], kinds


@pytest.mark.usefixtures("everything")
def test_langgraphs_patches_stand_in_for_langchains() -> None:
    assert active_integrations() == frozenset(discover()) - {"langchain"}


def test_nothing_is_wrapped_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    places: Counter[tuple[int, str]] = Counter()
    wrap = Patches.wrap

    def counting_wrap(self: Patches, target: Any, attribute: str, wrapper: Any, **options: Any) -> None:
        places[id(target), attribute] += 1
        wrap(self, target, attribute, wrapper, **options)

    monkeypatch.setattr(Patches, "wrap", counting_wrap)
    with Installed().installed(*discover()):
        assert places
    assert set(places.values()) == {1}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    "how", ["invoke", *(pytest.param(how, marks=pytest.mark.long) for how in ("ainvoke", "stream")), "astream"]
)
def test_langgraph_over_langchain(playground: Playground, how: str) -> None:
    """A LangChain agent as a LangGraph node, also with a callback handler."""
    model = ChatOpenAI(model="policy", api_key="sk-of-the-agent", max_retries=0)
    graph = StateGraph(MessagesState)
    graph.add_node("solver", create_agent(model, [add], name="solver"))
    graph.add_edge(START, "solver")
    program = graph.compile().with_config(callbacks=[LightningCallbackHandler()])
    with playground.rollout(train=["solver"]) as run:
        run_runnable(program, how, {"messages": [HumanMessage(ADD_PROMPT)]})
    calls, events = seen(run.trace)
    assert calls == ["solver", "solver"]
    assert events["tool", "add"] == 1
    assert len({call.id for call in run.trace.calls}) == 2


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("streamed", [False, True])
def test_agents_sdk_over_openai(playground: Playground, streamed: bool) -> None:
    @function_tool(name_override="add")
    def add_numbers(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def work() -> Trace:
        client = AsyncOpenAI(api_key="sk-of-the-agent", max_retries=0)
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="solver", model=model, tools=[add_numbers])
        config = RunConfig(tracing_disabled=True)
        async with client:
            with playground.rollout(train=["solver"]) as run:
                if streamed:
                    result = Runner.run_streamed(agent, ADD_PROMPT, run_config=config)
                    assert [event async for event in result.stream_events()]
                else:
                    await Runner.run(agent, ADD_PROMPT, run_config=config)
        return run.trace

    calls, events = seen(run_async(work()))
    assert calls == ["solver", "solver"]
    assert events == {("agent", "solver"): 1, ("tool", "add"): 1}
