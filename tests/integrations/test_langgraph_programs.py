"""The supervisor of LangGraph's documentation, unchanged: every call has its agent.

The scripted model plays each role by its system prompt. Names and numbers of calls are those that a reader of the program expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import pytest
from langchain.agents import AgentState, create_agent
from langchain_core.tools import InjectedToolCallId, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState
from langgraph.types import Command

from lightning_core import Trace
from lightning_core.testing import Playground, open_playground, tool_call
from lightning_core.testing.contract import ancestors, parent_of
from tests.integrations.combinations import combined
from tests.integrations.runnables import run_runnable

llm = ChatOpenAI(model="policy", api_key="sk-of-the-agent", max_retries=0)


@contextmanager
def played_by(script: Callable[[str], str]) -> Iterator[Playground]:
    with open_playground(script, integrations=["langgraph"]) as opened:
        yield opened


def agents_of(trace: Trace) -> list[str | None]:
    return [call.agent for call in trace.calls]


# A supervisor that delegates to a researcher and a mathematician.


def handoff_to(name: str) -> Any:
    @tool(f"transfer_to_{name}", description=f"Hand the work to {name}.")
    def handoff(
        state: Annotated[AgentState[Any], InjectedState], tool_call_id: Annotated[str, InjectedToolCallId]
    ) -> Command[Any]:
        done = {"role": "tool", "content": f"{name} takes over", "name": f"transfer_to_{name}"}
        return Command(
            goto=name,
            graph=Command.PARENT,
            update={"messages": [*state["messages"], {**done, "tool_call_id": tool_call_id}]},
        )

    return handoff


@tool
def search(query: str) -> str:
    """Search the web."""
    return "New York had a GDP of 2.3 trillion, the USA of 29.2 trillion."


@tool
def divide(a: float, b: float) -> float:
    """Divide two numbers."""
    return a / b


def supervised_team() -> Any:
    researcher = create_agent(llm, [search], system_prompt="You are a researcher.", name="research_agent")
    mathematician = create_agent(llm, [divide], system_prompt="You are a mathematician.", name="math_agent")
    supervisor = create_agent(
        llm,
        [handoff_to("research_agent"), handoff_to("math_agent")],
        system_prompt="You are a supervisor.",
        name="supervisor",
    )
    graph = StateGraph(MessagesState)
    graph.add_node("supervisor", supervisor, destinations=("research_agent", "math_agent", END))
    graph.add_node("research_agent", researcher)
    graph.add_node("math_agent", mathematician)
    graph.add_edge(START, "supervisor")
    graph.add_edge("research_agent", "supervisor")
    graph.add_edge("math_agent", "supervisor")
    return graph.compile()


def play_team(prompt: str) -> str:
    if "You are a researcher" in prompt:
        return "The figures are here." if "2.3 trillion" in prompt else tool_call("search", query="GDP")
    if "You are a mathematician" in prompt:
        return "It is 7.9 %." if "0.07" in prompt else tool_call("divide", a=2.3, b=29.2)
    if "The figures are here." not in prompt:
        return tool_call("transfer_to_research_agent")
    return "Done: 7.9 %." if "It is 7.9 %." in prompt else tool_call("transfer_to_math_agent")


@pytest.mark.parametrize(
    ("train", "how"),
    combined([["math_agent"], ["supervisor", "research_agent"]], ["invoke", "ainvoke", "stream", "astream"]),
)
def test_supervisor(how: str, train: list[str]) -> None:
    team = supervised_team()
    question = {"role": "user", "content": "What share of the GDP of the USA was New York's?"}
    with played_by(play_team) as playground, playground.rollout(train=train) as run:
        run_runnable(team, how, {"messages": [question]})
    trace = run.trace
    assert agents_of(trace) == [
        "supervisor",
        "research_agent",
        "research_agent",
        "supervisor",
        "math_agent",
        "math_agent",
        "supervisor",
    ]
    assert all(ancestors(trace, parent_of(trace, call))[0] == call.agent for call in trace.calls)
    tools = [(event.name, event.agent, event.error) for event in trace.events if event.kind == "tool"]
    assert tools == [
        ("transfer_to_research_agent", "supervisor", None),
        ("search", "research_agent", None),
        ("transfer_to_math_agent", "supervisor", None),
        ("divide", "math_agent", None),
    ]
