"""Keeps exceptions that would end a thread, an event loop or the process inside the rollout that raised them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from lightning_core.errors import show


class AgentExit(Exception):
    """Code of the program raised SystemExit, CancelledError or another exception that is not an `Exception`."""


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
            raise AgentExit(f"raised {show(error)}") from error
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
        raise AgentExit(f"raised {show(error)}") from error


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and its causes: clients raise their own errors from others. A group has its first member's."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        inner = found.exceptions[0] if isinstance(found, BaseExceptionGroup) else None
        found = inner or found.__cause__ or found.__context__
