"""Functions that the OpenAI Agents SDK calls next to an agent's model: their model calls are never the agent's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from agents import (
    AgentHooks,
    OpenAIResponsesModel,
    RunConfig,
    RunHooks,
    SQLiteSession,
    ToolGuardrailFunctionOutput,
    function_tool,
    handoff,
    tool_input_guardrail,
    tool_output_guardrail,
)
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, field_validator

from lightning_core.testing import tool_call
from tests.integrations.combinations import combined
from tests.integrations.sdk_programs import HOWS, Answer, add, cast, first, make, run

ADD = first(tool_call("add", a=1, b=2), "Done")
ASK = first(tool_call("ask", text="hm"), "Done")


INTEGRATION = "openai-agents"
pytestmark = pytest.mark.usefixtures("installed")


async def ask(*_: Any, **__: Any) -> None:
    """A model call of the program's own, with a client of its own."""
    messages: Any = [{"role": "system", "content": "Neighbour"}, {"role": "user", "content": "hm"}]
    async with AsyncOpenAI(api_key="sk-of-the-program", max_retries=0) as client:
        await client.chat.completions.create(model="gpt-4o", messages=messages)


def ask_at_once() -> None:
    messages: Any = [{"role": "system", "content": "Neighbour"}, {"role": "user", "content": "hm"}]
    with OpenAI(api_key="sk-of-the-program", max_retries=0) as client:
        client.chat.completions.create(model="gpt-4o", messages=messages)


@tool_input_guardrail
async def check_arguments(data: Any) -> ToolGuardrailFunctionOutput:
    await ask()
    return ToolGuardrailFunctionOutput.allow()


@tool_output_guardrail(name="check result")
async def check_result(data: Any) -> ToolGuardrailFunctionOutput:
    await ask()
    return ToolGuardrailFunctionOutput.reject_content("no")


async def write_instructions(context: Any, agent: Any) -> str:
    await ask()
    return "Writer"


async def is_open(context: Any, agent: Any) -> bool:
    await ask()
    return True


async def must_approve(context: Any, arguments: Any, call_id: str) -> bool:
    await ask()
    return False


async def explain(context: Any, error: Exception) -> str:
    await ask()
    return "failed"


async def shorten(data: Any) -> Any:
    await ask()
    return data.model_data


async def merge(history: Any, new: Any) -> Any:
    await ask()
    return history + new


async def greet(context: Any) -> None:
    await ask()


async def filter_input(data: Any) -> Any:
    await ask()
    return data


async def summarize(result: Any) -> str:
    await ask()
    return "short"


@function_tool
async def look_up(text: str) -> str:
    """Look it up."""
    await ask()
    return "found"


@function_tool(failure_error_function=explain)
def broken() -> str:
    """Fail."""
    raise RuntimeError("out of order")


class Checked(BaseModel):
    answer: str

    @field_validator("answer")
    @classmethod
    def check(cls, value: str) -> str:
        ask_at_once()
        return value


class Memory(SQLiteSession):
    """Summarises what it stores."""

    async def add_items(self, items: Any) -> None:
        await ask()
        await super().add_items(items)


class Compacting(SQLiteSession):
    async def run_compaction(self, *args: Any, **kwargs: Any) -> None:
        await ask()


class Watch(AgentHooks[Any]):
    async def on_start(self, context: Any, agent: Any) -> None:
        await ask()


class WatchTools(AgentHooks[Any]):
    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        await ask()


class WatchRun(RunHooks[Any]):
    async def on_llm_start(self, *args: Any) -> None:
        await ask()


class WatchEnd(RunHooks[Any]):
    async def on_agent_end(self, *args: Any) -> None:
        await ask()


class WatchHandoff(RunHooks[Any]):
    async def on_handoff(self, *args: Any, **kwargs: Any) -> None:
        await ask()


def tool(**settings: Any) -> Any:
    @function_tool(name_override="add", **settings)
    def add_numbers(a: int, b: int) -> int:
        return a + b

    return add_numbers


def hand_over(**settings: Any) -> Any:
    return [handoff(make("Editor"), **settings)]


def config(**settings: Any) -> RunConfig:
    return RunConfig(tracing_disabled=True, **settings)


def merged() -> dict[str, Any]:
    return {"run_config": config(session_input_callback=merge)}


def helper(**settings: Any) -> Any:
    return make("Helper").as_tool("help", "Helps.", **settings)


def responses_model() -> OpenAIResponsesModel:
    return OpenAIResponsesModel("gpt-4o", AsyncOpenAI(api_key="sk-of-the-agent", max_retries=0))


OVER = tool_call("transfer_to_editor")
HELP = first(tool_call("help", input="hm"), "Done")
Case = tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]], Answer, str]
NEIGHBOURS: dict[str, Case] = {
    "tool input guardrail": (
        lambda: {"tools": [tool(tool_input_guardrails=[check_arguments])]}, dict, ADD, "check_arguments"
    ),
    "tool output guardrail": (lambda: {"tools": [tool(tool_output_guardrails=[check_result])]}, dict, ADD, "check result"),
    "instructions": (lambda: {"instructions": write_instructions}, dict, "Done", "write_instructions"),
    "a tool's is_enabled": (lambda: {"tools": [tool(is_enabled=is_open)]}, dict, "Done", "is_open"),
    "a handoff's is_enabled": (lambda: {"handoffs": hand_over(is_enabled=is_open)}, dict, "Done", "is_enabled"),
    "on_handoff": (lambda: {"handoffs": hand_over(on_handoff=greet)}, dict, OVER, "transfer_to_editor"),
    "a handoff's filter": (lambda: {"handoffs": hand_over(input_filter=filter_input)}, dict, OVER, "transfer_to_editor"),
    "failure_error_function": (lambda: {"tools": [broken]}, dict, first(tool_call("broken"), "Done"), "explain"),
    "needs_approval": (lambda: {"tools": [tool(needs_approval=must_approve)]}, dict, ADD, "must_approve"),
    "session_input_callback": (dict, lambda: {"session": SQLiteSession("1"), **merged()}, "Done", "merge"),
    "a session": (dict, lambda: {"session": Memory("1")}, "Done", "Memory"),
    "compaction": (lambda: {"model": responses_model()}, lambda: {"session": Compacting("1")}, "Done", "Compacting"),
    "call_model_input_filter": (dict, lambda: {"run_config": config(call_model_input_filter=shorten)}, "Done", "shorten"),
    "custom_output_extractor": (lambda: {"tools": [helper(custom_output_extractor=summarize)]}, dict, HELP, "help"),
    "a tool": (lambda: {"tools": [look_up]}, dict, first(tool_call("look_up", text="hm"), "Done"), "look_up"),
    "a validator": (lambda: {"output_type": Checked}, dict, '{"answer": "Done"}', "Writer.turn"),
    "AgentHooks": (lambda: {"hooks": Watch()}, dict, "Done", "Watch.on_start"),
    "AgentHooks of tools": (lambda: {"hooks": WatchTools(), "tools": [add]}, dict, ADD, "WatchTools.on_tool_end"),
    "RunHooks": (dict, lambda: {"hooks": WatchRun()}, "Done", "WatchRun.on_llm_start"),
    "RunHooks at the end": (dict, lambda: {"hooks": WatchEnd()}, "Done", "WatchEnd.on_agent_end"),
    "RunHooks of handoffs": (lambda: {"handoffs": hand_over()}, lambda: {"hooks": WatchHandoff()}, OVER, "WatchHandoff.on_handoff"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "how"), combined(list(NEIGHBOURS), HOWS))
def test_a_neighbour_is_not_the_agent(name: str, how: str) -> None:
    settings, options, answer, place = NEIGHBOURS[name]
    script: dict[str, Answer] = {"Writer": answer, "Neighbour": "ok", "Editor": "Edited", "Helper": "ok"}
    with cast(script) as playground, playground.rollout(train=["Writer"]) as rollout:
        run(make("Writer", **settings()), "go", how, **options())
    by_prompt = {(str(call.messages[0]["content"]), call.agent) for call in rollout.trace.calls}
    assert ("Writer", "Writer") in by_prompt
    assert {agent for prompt, agent in by_prompt if prompt == "Neighbour"} == {place}
    assert {agent for prompt, agent in by_prompt if prompt == "Writer"} == {"Writer"}
