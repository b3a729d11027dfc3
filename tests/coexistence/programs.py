"""Programs of four frameworks: each has the agents ``plan`` and ``write``, and ``write`` calls a tool.

The environment says which instrumentation is initialized, and when: ``before`` Lightning, when this module is imported, or ``after`` it,
in the first rollout.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient
from langchain_core.output_parsers import StrOutputParser
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import AsyncOpenAI

from tests.coexistence.instruments import INSTRUMENTS

INSTRUMENT, ORDER = os.environ.get("COEXISTS_WITH", ""), os.environ.get("COEXISTS_SINCE", "")
PLAN = "Be brief. CALL transfer_to_write {}"
WRITE = 'Be kind. CALL look_up {"word": "hi"}'


_lock = threading.Lock()
_initialized: list[str] = []


def initialize() -> None:
    """Initialize the instrumentation, once."""
    with _lock:
        if INSTRUMENT and not _initialized:
            INSTRUMENTS[INSTRUMENT]()
            _initialized.append(INSTRUMENT)


def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word} is a word"


async def openai_agents(task: Any) -> float:
    model = OpenAIChatCompletionsModel("gpt", AsyncOpenAI(api_key="k"))
    write = Agent("write", instructions=WRITE, model=model, tools=[function_tool(look_up)])
    plan = Agent("plan", instructions=PLAN, model=model, handoffs=[write])
    await Runner.run(plan, str(task["id"]))
    result = Runner.run_streamed(plan, str(task["id"]))
    async for _ in result.stream_events():
        pass
    return 1.0


def langgraph(task: Any) -> float:
    model = ChatOpenAI(model="gpt", api_key="k")  # pyright: ignore[reportArgumentType]
    tools = [tool(look_up)]

    def plan(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def write(state: MessagesState) -> Any:
        return {"messages": [model.bind_tools(tools).invoke([("system", WRITE), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("plan", plan)
    graph.add_node("write", write)
    graph.add_node("tools", ToolNode(tools))
    for one, other in ((START, "plan"), ("plan", "write"), ("tools", "write")):
        graph.add_edge(one, other)
    graph.add_conditional_edges("write", tools_condition)
    graph.compile().invoke({"messages": [("user", str(task["id"]))]})  # pyright: ignore
    return 1.0


def langchain(task: Any) -> float:
    model = ChatOpenAI(model="gpt", api_key="k")  # pyright: ignore[reportArgumentType]
    read = tool(look_up)
    plan = (model | StrOutputParser()).with_config(run_name="plan")
    write = model.bind_tools([read]).with_config(run_name="write")
    plan.invoke(str(task["id"]))
    for call in write.invoke([("system", WRITE), ("user", "hi")]).tool_calls:
        read.invoke(call)
    return 1.0


async def autogen(task: Any) -> float:
    info: Any = {"family": "unknown"} | dict.fromkeys(("vision", "json_output", "structured_output"), False)
    client = OpenAIChatCompletionClient(model="policy", api_key="k", model_info={**info, "function_calling": True})
    plan = AssistantAgent("plan", client, system_message="Be brief.")
    write = AssistantAgent("write", client, system_message=WRITE, tools=[look_up])
    await RoundRobinGroupChat([plan, write], termination_condition=MaxMessageTermination(3)).run(task=str(task["id"]))
    return 1.0


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    program.__name__: program for program in (openai_agents, langgraph, langchain, autogen)
}


async def solve(task: Any) -> float:
    """Run the program that the task names."""
    initialize()
    result = PROGRAMS[task["program"]](task)
    return await result if inspect.isawaitable(result) else result


if ORDER == "before":
    initialize()
