"""The OpenAI Agents SDK: the contract, and what only its agents have."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from agents import (
    Agent,
    AgentHooks,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from httpx2 import Limits
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from lightning_core.trainable import trainable

from tests.integrations.contract import Adapter, Contract, Part, run_async

QUIET = RunConfig(tracing_disabled=True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers that are not negative."""
    if b < 0:
        raise ValueError("b is negative")
    return a + b


def chat_model(base_url: str | None = None) -> OpenAIChatCompletionsModel:
    # No connection is kept, since run_sync has a loop for each thread and a connection belongs to one.
    http_client = DefaultAsyncHttpxClient(limits=Limits(max_keepalive_connections=0))
    client = AsyncOpenAI(api_key="sk-of-the-agent", base_url=base_url, max_retries=0, http_client=http_client)
    return OpenAIChatCompletionsModel("policy", client)


class AfterTheCall(AgentHooks[Any]):
    """Does what a part does after its model call."""

    def __init__(self, inner: Agent[Any] | None, part: Part) -> None:
        self.inner = inner
        self.part = part

    async def on_end(self, context: Any, agent: Any, output: Any) -> None:
        if self.inner is not None and self.part.inner is not None:
            await Runner.run(self.inner, self.part.inner.text, run_config=QUIET)
        if self.part.error is not None:
            raise self.part.error


class OpenAIAgentsAdapter(Adapter):
    """Every part an agent and a run of its own."""

    integration = "openai-agents"
    host = "agents"

    def build(self, parts: Sequence[Part], *, parallel: bool = False, base_url: str | None = None) -> Any:
        return parallel, [(self.make_agent(part, base_url), part.text) for part in parts]

    def make_agent(self, part: Part, base_url: str | None) -> Agent[Any]:
        inner = self.make_agent(part.inner, base_url) if part.inner else None
        agent = Agent[Any](
            name=part.name,
            model=chat_model(base_url),
            tools=[add] if part.tool else [],
            hooks=AfterTheCall(inner, part),
        )
        return trainable(agent, name=part.name) if part.marked else agent

    def run(self, program: Any) -> None:
        parallel, runs = program
        with ThreadPoolExecutor(len(runs) if parallel else 1) as pool:
            work = [pool.submit(Runner.run_sync, *run, run_config=QUIET) for run in runs]
            for future in work:
                future.result()

    async def arun(self, program: Any) -> None:
        await self.each(program, lambda run: Runner.run(*run, run_config=QUIET))

    def stream(self, program: Any) -> None:
        run_async(self.astream(program))

    async def astream(self, program: Any) -> None:
        async def consume(run: Any) -> None:
            result = Runner.run_streamed(*run, run_config=QUIET)
            assert [event async for event in result.stream_events()]

        await self.each(program, consume)

    async def each(self, program: Any, start: Any) -> None:
        parallel, runs = program
        if parallel:
            await asyncio.gather(*map(start, runs))
        else:
            for run in runs:
                await start(run)

    def patched_call(self) -> tuple[Any, str]:
        from agents.run import AgentRunner

        return AgentRunner, "run"


class TestOpenAIAgents(Contract):
    adapter = OpenAIAgentsAdapter()
