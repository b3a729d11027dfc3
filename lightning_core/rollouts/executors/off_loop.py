"""Runs code of tasks, such as their copying, on threads: the runner's event loop must not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_core.rollouts.executors.tool_threads import ToolThreads

T = TypeVar("T")

SECONDS = 60.0
"""Time limit of a call."""
_threads = ToolThreads(SECONDS)
_MOST_VALUES, _MOST_CHARACTERS = 256, 1 << 16
_SCALARS = frozenset({int, float, bool, type(None)})


async def off_loop(function: Callable[[], T], task: Any) -> T:
    """The result of ``function``, which handles ``task``: on a thread, unless it is a small plain value. Raises TimeoutError at the time
    limit.
    """
    if _is_small(task):
        return function()
    return await asyncio.wait_for(asyncio.wrap_future(_threads.submit(function)), SECONDS)


def _is_small(task: Any) -> bool:
    """Whether ``task`` is of JSON's types only, whose copying runs no other code, and few of them."""
    todo, values, characters = [task], 1, 0
    while todo:
        value = todo.pop()
        if type(value) is str:
            characters += len(value)
        elif type(value) is dict:
            values += 2 * len(value)
            todo += [*value, *value.values()] if values <= _MOST_VALUES else []
        elif type(value) is list:
            values += len(value)
            todo += value if values <= _MOST_VALUES else []
        elif type(value) not in _SCALARS:
            return False
        if values > _MOST_VALUES or characters > _MOST_CHARACTERS:
            return False
    return True
