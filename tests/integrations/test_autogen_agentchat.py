"""AutoGen AgentChat: the contract, and what only its agents and teams have."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import autogen_core._single_threaded_agent_runtime as runtimes
import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, MessageFilterAgent, SocietyOfMindAgent
from autogen_agentchat.agents._message_filter_agent import MessageFilterConfig, PerSourceFilter
from autogen_agentchat.base import Response, TaskResult
from autogen_agentchat.conditions import HandoffTermination, MaxMessageTermination, TextMentionTermination
from autogen_agentchat.messages import HandoffMessage, TextMessage
from autogen_agentchat.teams import (
    BaseGroupChat,
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer
from autogen_agentchat.teams._group_chat._events import GroupChatRequestPublish
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import CancellationToken, RoutedAgent, SingleThreadedAgentRuntime
from autogen_core.models import ModelFamily, ModelInfo, UserMessage
from autogen_core.tools import BaseTool, FunctionTool, ToolResult, Workbench
from autogen_ext.models.openai import OpenAIChatCompletionClient

from lightning_core.capture import current_run
from lightning_core.errors import ConfigError
from lightning_core.integration import Installed
from lightning_core.trace import Event, Trace
from lightning_core.trainable import trainable
from tests.conftest import Endpoint, redirected, serve_script
from tests.integrations.contract import ADD, Adapter, Contract, Part, ancestors, parent_of, run_async, says

INFO = ModelInfo(
    vision=False, function_calling=True, json_output=False, structured_output=False, family=ModelFamily.UNKNOWN
)


def add(a: int, b: int) -> int:
    """Add two numbers that are not negative."""
    if b < 0:
        raise ValueError("b is negative")
    return a + b


def chat_client(base_url: str | None = None) -> OpenAIChatCompletionClient:
    # AutoGen warns of an answer by another model than was asked for.
    options: dict[str, Any] = {"model": "policy"} if base_url is None else {"model": "recorded", "base_url": base_url}
    return OpenAIChatCompletionClient(api_key="sk-of-the-agent", model_info=INFO, max_retries=0, **options)


@asynccontextmanager
async def client(base_url: str | None = None) -> AsyncGenerator[OpenAIChatCompletionClient]:
    model = chat_client(base_url)
    try:
        yield model
    finally:
        await model.close()


class PartAgent(AssistantAgent):
    """An assistant that says its own prompt, whatever it is told, and does what its part does after that."""

    def __init__(self, part: Part, model: OpenAIChatCompletionClient, *, stream: bool) -> None:
        super().__init__(
            part.name.replace(" ", "_"),
            model,
            tools=[add] if part.tool else None,
            reflect_on_tool_use=part.tool,
            model_client_stream=stream,
        )
        self.part = part
        self.inner = None if part.inner is None else make_agent(part.inner, model, stream=stream)

    async def on_messages_stream(self, messages: Any, cancellation_token: Any) -> AsyncGenerator[Any, None]:
        own = [TextMessage(content=self.part.text, source="user")]
        async for message in super().on_messages_stream(own, cancellation_token):
            if isinstance(message, Response):
                if self.inner is not None:
                    await self.inner.run(task="go on")
                if self.part.error is not None:
                    raise self.part.error
            yield message


def make_agent(part: Part, model: OpenAIChatCompletionClient, *, stream: bool) -> AssistantAgent:
    agent = PartAgent(part, model, stream=stream)
    return trainable(agent, name=part.name) if part.marked else agent


class AutoGenAdapter(Adapter):
    """Several parts are a round-robin team; one part alone, and each of parallel ones, an agent that runs by itself.

    Agents and teams are made for each run: they hold state, and a team refuses to run twice at once.
    """

    integration = "autogen-agentchat"
    host = "autogen_agentchat"

    def build(self, parts: Sequence[Part], *, parallel: bool = False, base_url: str | None = None) -> Any:
        return list(parts), parallel, base_url

    def run(self, program: Any) -> None:
        asyncio.run(self.arun(program))

    async def arun(self, program: Any) -> None:
        await self.each(program, stream=False)

    def stream(self, program: Any) -> None:
        asyncio.run(self.astream(program))

    async def astream(self, program: Any) -> None:
        await self.each(program, stream=True)

    async def each(self, program: Any, *, stream: bool) -> None:
        parts, parallel, base_url = program
        async with client(base_url) as model:
            agents: list[Any] = [make_agent(part, model, stream=stream) for part in parts]
            if parallel or len(agents) == 1:
                await asyncio.gather(*(self.start(agent, stream=stream) for agent in agents))
            else:
                await self.start(RoundRobinGroupChat(agents, max_turns=len(agents)), stream=stream)

    async def start(self, runner: Any, *, stream: bool) -> None:
        if stream:
            assert [message async for message in runner.run_stream(task="go on")]
        else:
            await runner.run(task="go on")

    def patched_call(self) -> tuple[Any, str]:
        return BaseChatAgent, "run"


class TestAutoGen(Contract):
    adapter = AutoGenAdapter()
