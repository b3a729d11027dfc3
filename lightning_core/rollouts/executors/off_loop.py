"""Runs code of tasks, such as their copying, on threads: the runner's event loop must not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from lightning_core.rollouts.executors.tool_threads import ToolThreads

T = TypeVar("T")

SECONDS = 60.0
"""Time limit of a call."""
_threads = ToolThreads(SECONDS)


async def off_loop(function: Callable[[], T]) -> T:
    """The result of ``function``. Raises TimeoutError at the time limit."""
    return await asyncio.wait_for(asyncio.wrap_future(_threads.submit(function)), SECONDS)
