"""Agents of several frameworks as functions with a name, which worker processes can import. Each imports its framework when it runs."""

from __future__ import annotations

from typing import Any

URL = "https://api.openai.com/v1"


async def with_langgraph(task: Any) -> float:
    from langchain_core.messages import AIMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    @tool
    def look_up(word: str) -> str:
        """Look a word up."""
        return f"{word} is a word"

    async def plan(state: MessagesState) -> dict[str, Any]:
        reply = await ChatOpenAI(model="gpt", api_key="k").ainvoke(state["messages"])  # pyright: ignore[reportArgumentType]
        call = {"name": "look_up", "args": {"word": "hi"}, "id": "call-1"}
        return {"messages": [reply, AIMessage("", tool_calls=[call])]}  # pyright: ignore[reportArgumentType]

    async def write(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await ChatOpenAI(model="gpt", api_key="k").ainvoke("write")]}  # pyright: ignore[reportArgumentType]

    graph = StateGraph(MessagesState)
    graph.add_node("plan", plan)
    graph.add_node("tools", ToolNode([look_up]))
    graph.add_node("write", write)
    for one, other in ((START, "plan"), ("plan", "tools"), ("tools", "write"), ("write", END)):
        graph.add_edge(one, other)
    await graph.compile().ainvoke({"messages": [("user", str(task["id"]))]})  # pyright: ignore
    return 1.0


async def with_openai_agents(task: Any) -> float:
    from agents import Agent, OpenAIChatCompletionsModel, Runner
    from openai import AsyncOpenAI

    model = OpenAIChatCompletionsModel("gpt", AsyncOpenAI(api_key="k"))
    for name in ("plan", "write"):
        await Runner.run(Agent(name, model=model), str(task["id"]))
    return 1.0


async def with_autogen(task: Any) -> float:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {"family": "unknown"} | dict.fromkeys(
        ("vision", "function_calling", "json_output", "structured_output"), False
    )
    for name in ("plan", "write"):
        client = OpenAIChatCompletionClient(model="policy", api_key="k", model_info=info)
        await AssistantAgent(name, client).run(task=str(task["id"]))
    return 1.0


async def with_autogen_core(task: Any) -> float:
    from autogen_core import AgentId, BaseAgent, SingleThreadedAgentRuntime
    from openai import AsyncOpenAI

    class Speaker(BaseAgent):
        async def on_message_impl(self, message: Any, ctx: Any) -> None:
            messages: Any = [{"role": "user", "content": message}]
            await AsyncOpenAI(api_key="k").chat.completions.create(model="gpt", messages=messages)

    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    for name in ("plan", "write"):
        await Speaker.register(runtime, name, lambda: Speaker("speaks"))
        await runtime.send_message(str(task["id"]), AgentId(name, "default"))
    await runtime.stop_when_idle()
    return 1.0


def with_host_spans(task: Any) -> float:
    import httpx
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider().get_tracer("a_framework")
    body = {"model": "gpt", "messages": [{"role": "user", "content": str(task["id"])}]}
    for name in ("plan", "write"):
        attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
        with tracer.start_as_current_span(f"invoke_agent {name}", attributes=attributes):
            httpx.post(f"{URL}/chat/completions", json=body).raise_for_status()
    return 1.0
