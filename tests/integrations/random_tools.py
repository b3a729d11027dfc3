"""The same program in four frameworks: an agent with tools that never give the same result twice.

In order of its turns, the agent calls ``weather`` twice in parallel with equal arguments, ``flaky``, which may fail and is then called
again, ``ask``, which runs another trained agent, and answers. All results are in its prompts.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from functools import cache
from typing import Any

from agents import Agent as SdkAgent
from agents import OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.tools import AgentTool
from autogen_core.models import ModelFamily, ModelInfo
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from langchain.agents import create_agent
from langchain.agents.middleware import ToolRetryMiddleware
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import AsyncOpenAI
from pydantic import SecretStr

from lightning_core import replayable, trainable
from lightning_core.testing import tool_call
from tests.signals.forked_agents import said, user

TOOLS = frozenset({"weather", "flaky", "ask"})
AGENTS = frozenset({"clerk", "helper"})
ran: list[str] = []
"""The tools that ran in this process."""


def script(rng: random.Random, prompt: str) -> str:
    """The answers of the model."""
    if "<|im_start|>system\nguest" in prompt:
        return tool_call("transfer_to_clerk")
    if "<|im_start|>system\nclerk" not in prompt:
        return f"an answer {rng.random()}"
    results = (
        prompt.count("<tool_response>")
        - prompt.count("{'assistant': 'clerk'}")
        - prompt.count('{"assistant": "clerk"}')
    )
    if results == 0:
        return 2 * tool_call("weather", city="Oslo")
    if results == 2:
        return tool_call("flaky", query=rng.choice(("a", "b")))
    if results == 3:
        argument = "task" if '"task"' in prompt else "query"  # an agent as a tool has other parameters
        return tool_call("ask", **{argument: rng.choice(("a", "b"))})
    return f"done {rng.random()}"


@trainable("helper")
def _help(query: str) -> str:
    return said([user(f"{query} {uuid.uuid4()}")])


def _weather(city: str) -> str:
    """The weather in a city."""
    ran.append("weather")
    return f"{random.SystemRandom().random()} degrees in {city}"


def _flaky(query: str) -> str:
    """Looks something up."""
    ran.append("flaky")
    if random.SystemRandom().random() < 0.5:
        raise TimeoutError(f"no answer {uuid.uuid4()}")
    return str(uuid.uuid4())


def _ask(query: str) -> str:
    """Gets advice."""
    ran.append("ask")
    return _help(query)


async def _async_weather(city: str) -> str:
    """The weather in a city."""
    await asyncio.sleep(0.001)
    return _weather(city)


def _langchain_tools() -> list[Any]:
    return [tool("weather")(_weather), tool("flaky")(_flaky), tool("ask")(_ask)]


def _chat_model() -> ChatOpenAI:
    return ChatOpenAI(model="gpt", api_key=SecretStr("any"), max_retries=0)


@cache
def _langchain() -> Any:
    retry = ToolRetryMiddleware(max_retries=2, initial_delay=0.0, jitter=False)
    return create_agent(
        _chat_model(), tools=_langchain_tools(), system_prompt="clerk", name="clerk",
        middleware=[retry],
    )  # fmt: skip


def langchain_agent(task: dict[str, Any]) -> float:
    """An agent of `create_agent`, whose failed tools are called again at once."""
    return _reward(_langchain().invoke({"messages": [("user", task["prompt"])]})["messages"][-1].text)


@cache
def _langgraph() -> Any:
    model = _chat_model().bind_tools(_langchain_tools())

    async def clerk(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke([("system", "clerk"), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("clerk", clerk)
    graph.add_node("tools", ToolNode(_langchain_tools(), handle_tool_errors=True))
    graph.add_edge(START, "clerk")
    graph.add_conditional_edges("clerk", tools_condition)
    graph.add_edge("tools", "clerk")
    return graph.compile()


async def langgraph_agent(task: dict[str, Any]) -> float:
    """A graph with a node for tools, run asynchronously; the model gets the errors of tools."""
    return _reward((await _langgraph().ainvoke({"messages": [("user", task["prompt"])]}))["messages"][-1].text)


def _sdk_clerk(client: AsyncOpenAI, tools: dict[str, Callable[..., Any]], **settings: Any) -> SdkAgent[Any]:
    return SdkAgent(
        name="clerk",
        instructions="clerk",
        model=OpenAIChatCompletionsModel("gpt", client),
        tools=[function_tool(function, name_override=name) for name, function in tools.items()],
        **settings,
    )


async def _run_sdk(task: dict[str, Any], tools: dict[str, Callable[..., Any]]) -> float:
    async with AsyncOpenAI(api_key="any", max_retries=0) as client:
        result = await Runner.run(
            _sdk_clerk(client, tools), task["prompt"], run_config=RunConfig(tracing_disabled=True)
        )
    return _reward(str(result.final_output))


async def openai_agents(task: dict[str, Any]) -> float:
    """An agent of the OpenAI Agents SDK."""
    return await _run_sdk(task, {"weather": _async_weather, "flaky": _flaky, "ask": _ask})


async def handing_over(task: dict[str, Any]) -> float:
    """An agent hands over to the clerk; both are created at run time."""
    async with AsyncOpenAI(api_key="any", max_retries=0) as client:
        clerk = _sdk_clerk(client, {"weather": _async_weather, "flaky": _flaky, "ask": _ask})
        model = OpenAIChatCompletionsModel("gpt", client)
        guest = SdkAgent(name="guest", instructions="guest", model=model, handoffs=[clerk])
        result = await Runner.run(guest, task["prompt"], run_config=RunConfig(tracing_disabled=True))
    return _reward(str(result.final_output))


async def autogen_with_an_agent_as_tool(task: dict[str, Any]) -> float:
    """The tool ``ask`` is an agent of AutoGen, whose prompts never repeat."""
    client = _autogen_client()
    helper = AssistantAgent("ask", client, system_message=f"helper {uuid.uuid4()}", description="Gets advice.")
    tools = {"weather": _async_weather, "flaky": _flaky}
    return await _run_autogen(client, task, [*map(_function_tool, tools, tools.values()), AgentTool(helper)])


async def autogen(task: dict[str, Any]) -> float:
    """An AutoGen agent."""
    tools = {"weather": _async_weather, "flaky": _flaky, "ask": _ask}
    return await _run_autogen(_autogen_client(), task, list(map(_function_tool, tools, tools.values())))


def _function_tool(name: str, function: Callable[..., Any]) -> FunctionTool:
    return FunctionTool(function, name=name, description=str(function.__doc__))


def _autogen_client() -> OpenAIChatCompletionClient:
    info = ModelInfo(
        vision=False, function_calling=True, json_output=False, structured_output=False, family=ModelFamily.UNKNOWN
    )
    return OpenAIChatCompletionClient(model="policy", model_info=info, api_key="any", max_retries=0)


async def _run_autogen(client: OpenAIChatCompletionClient, task: dict[str, Any], tools: list[Any]) -> float:
    clerk = AssistantAgent("clerk", client, tools=tools, system_message="clerk", max_tool_iterations=9)
    try:
        result = await clerk.run(task=task["prompt"])
    finally:
        await client.close()
    return _reward(result.messages[-1].to_text())


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "LangGraph": langgraph_agent,
    "LangChain": langchain_agent,
    "OpenAI Agents SDK": openai_agents,
    "AutoGen": autogen,
}


@replayable
def marked_weather(city: str) -> str:
    """The weather in a city."""
    return _weather(city)


async def marked(task: dict[str, Any]) -> float:
    """A function with ``@replayable`` that is a tool of a framework."""
    return await _run_sdk(task, {"weather": marked_weather, "flaky": _constant, "ask": _constant})


def _constant(query: str) -> str:
    """The same result for the same arguments."""
    return query


def _reward(text: str) -> float:
    return len(text) / 100


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "prompt": f"task {i}"} for i in range(count)]
