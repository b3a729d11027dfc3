"""Keeps exceptions that would end a thread, an event loop or the process inside the rollout that raised them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from lightning_core.trace import show


class AgentExit(Exception):
    """The agent raised SystemExit, CancelledError or another exception that is not an `Exception`."""


def contained(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, sync or async, with `AgentExit` in place of exceptions such as SystemExit."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def contained_coroutine(*args: Any) -> Any:
            return await _settled(function(*args))

        return contained_coroutine

    @functools.wraps(function)
    def contained_function(*args: Any) -> Any:
        try:
            result = function(*args)
        except Exception:
            raise
        except BaseException as error:
            raise AgentExit(f"the agent raised {show(error)}") from error
        return _settled(result) if inspect.isawaitable(result) else result

    return contained_function


async def _settled(work: Awaitable[Any]) -> Any:
    task = asyncio.current_task()
    try:
        return await work
    except Exception:
        raise
    except BaseException as error:
        if task is not None and task.cancelling():  # by the runner
            raise
        raise AgentExit(f"the agent raised {show(error)}") from error
