"""A tool and a model for LangChain, and its Runnables run with each of their methods."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import ToolException, tool
from langchain_openai import ChatOpenAI

from lightning_core.testing.contract import run_async


@tool
def add(a: int, b: int) -> int:
    """Add two numbers that are not negative."""
    if b < 0:
        raise ToolException("b is negative")
    return a + b


add.handle_tool_error = True


def chat_model(base_url: str | None = None) -> ChatOpenAI:
    return ChatOpenAI(model="policy", api_key="sk-of-the-agent", base_url=base_url, max_retries=0)


def run_runnable(runnable: Any, how: str, input: Any) -> Any:
    """The result of ``runnable`` on ``input``, run with the method ``how``."""

    async def consume() -> list[Any]:
        if how == "astream_events":
            return [event async for event in runnable.astream_events(input, version="v2")]
        return [chunk async for chunk in runnable.astream(input)]

    match how:
        case "astream" | "astream_events":
            return run_async(consume())
        case "stream":
            return list(runnable.stream(input))
        case "batch":
            return runnable.batch([input, input])
        case "abatch":
            return run_async(runnable.abatch([input, input]))
        case "ainvoke":
            return run_async(runnable.ainvoke(input))
        case _:
            return runnable.invoke(input)
