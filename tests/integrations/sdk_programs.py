"""Programs of the OpenAI Agents SDK for tests: one script serves all agents and answers by agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from typing import Any

from agents import Agent, Model, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool, set_trace_processors
from httpx2 import Limits
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from lightning_core import Call, Trace
from lightning_core.testing import Playground, open_playground
from lightning_core.testing.contract import ancestors, parent_of, run_async
from lightning_core.trace import Event

set_trace_processors([])  # the SDK's own would send traces to the provider
QUIET = RunConfig(tracing_disabled=True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers that are not negative."""
    if b < 0:
        raise ValueError("b is negative")
    return a + b


def chat_model(base_url: str | None = None) -> OpenAIChatCompletionsModel:
    # Connections are not kept: run_sync has a loop per thread, and a connection belongs to one loop.
    http_client = DefaultAsyncHttpxClient(limits=Limits(max_keepalive_connections=0))
    client = AsyncOpenAI(api_key="sk-of-the-agent", base_url=base_url, max_retries=0, http_client=http_client)
    return OpenAIChatCompletionsModel("policy", client)


class Delegate(Model):
    """A third party's model, which may run another agent after its own call."""

    def __init__(self, model: Model, *then: Any) -> None:
        self.model = model
        self.then = then

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        response = await self.model.get_response(*args, **kwargs)
        if self.then:
            await Runner.run(*self.then, run_config=QUIET)
        return response

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for event in self.model.stream_response(*args, **kwargs):
            yield event
        if self.then:
            await Runner.run(*self.then, run_config=QUIET)


# One script serves all agents and chooses the response by agent. A name is also the start of an agent's instructions.

Answer = str | Callable[[str], str]


def first(answer: str, then: str) -> Answer:
    """``answer``, or ``then`` after a tool result for this agent."""
    return lambda prompt: then if "<tool_response>" in prompt else answer


@contextmanager
def cast(answers: dict[str, Answer], *, delay: float = 0.0) -> Generator[Playground]:
    """A playground whose script answers by the agent whose instructions start the prompt."""

    def script(prompt: str) -> str:
        system = prompt.partition("<|im_start|>system\n")[2]
        answer = next(answer for name, answer in answers.items() if system.startswith(name))
        return answer(prompt) if callable(answer) else answer

    with open_playground(script, integrations=(), delay=delay) as opened:
        yield opened


def make(name: str, **settings: Any) -> Agent[Any]:
    return Agent(name=name, **{"instructions": name, "model": chat_model(), **settings})


def run(agent: Agent[Any], text: str, how: str = "run", **settings: Any) -> Any:
    """The result of ``agent``, run with the method ``how``."""
    settings.setdefault("run_config", QUIET)

    async def work() -> Any:
        if how == "run_streamed":
            result = Runner.run_streamed(agent, text, **settings)
            async for _ in result.stream_events():
                pass
            return result
        return await Runner.run(agent, text, **settings)

    return Runner.run_sync(agent, text, **settings) if how == "run_sync" else run_async(work())


HOWS = ["run", "run_sync", "run_streamed"]


def speakers(trace: Trace) -> list[str | None]:
    return [call.agent for call in trace.calls]


def path(trace: Trace, call: Call) -> list[str]:
    return ancestors(trace, parent_of(trace, call))


def tools(trace: Trace) -> list[Event]:
    return [event for event in trace.events if event.kind == "tool"]
