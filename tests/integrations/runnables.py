"""Runs LangChain Runnables with each of their methods."""

from __future__ import annotations

from typing import Any

from lightning_core.testing.contract import run_async


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
