"""Runs the bodies of tools, or lets the rollout's `ToolRunner` do it.

An integration calls a tool's body through `run_tool` or `arun_tool` in the tool's scope, so the framework's own steps around the
body always happen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from lightning_core.capture.run import ToolRunner
from lightning_core.capture.scope import current_rollout
from lightning_core.capture.spans import SpanHandle
from lightning_core.trace import TOOL

T = TypeVar("T")


def run_tool(handle: SpanHandle, body: Callable[[], T], *, marked: bool = False) -> T:
    """The result of ``body``, the tool of the span ``handle``. ``marked``: see `ToolRunner.selects`."""
    runner = _runner(handle.attributes.get(TOOL), marked=marked)
    return body() if runner is None else runner.run(handle, body)


async def arun_tool(handle: SpanHandle, body: Callable[[], Awaitable[T]], *, marked: bool = False) -> T:
    """`run_tool` for a ``body`` that returns an awaitable."""
    runner = _runner(handle.attributes.get(TOOL), marked=marked)
    return await (body() if runner is None else runner.arun(handle, body))


def keeps_result(name: str, *, marked: bool = False) -> bool:
    """Whether the rollout's `ToolRunner` runs the tool ``name``."""
    return _runner(name, marked=marked) is not None


def _runner(name: object, *, marked: bool) -> ToolRunner | None:
    run = current_rollout()
    if run is None or run.tools is None or not isinstance(name, str):
        return None
    return run.tools if run.tools.selects(name, marked=marked) else None
