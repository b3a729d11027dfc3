"""An event loop on its own thread, for synchronous code that runs coroutines."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

P = ParamSpec("P")
T = TypeVar("T")

_POLL_SECONDS = 0.2


class BackgroundLoop:
    """Runs coroutine functions on the event loop of ``portal``.

    The calling thread may have a running loop itself.
    """

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal

    def call(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of ``await function(...)``, run in a copy of the caller's context.

        Ctrl-C in the calling thread cancels the coroutine.
        """
        # AnyIO marks its own context as being inside an event loop, and `anyio.run` refuses to start in such a context.
        # A synchronous agent inherits the context that `function` runs in and may call it.
        context = contextvars.copy_context()

        async def run() -> T:
            return await asyncio.create_task(function(*args, **kwargs), context=context)

        future = self._portal.start_task_soon(run)
        try:
            while not future.done():
                wait([future], _POLL_SECONDS)  # without a timeout, Ctrl-C does not interrupt it on every platform
            return future.result()
        finally:
            future.cancel()


@contextmanager
def background_loop() -> Generator[BackgroundLoop]:
    """Start a loop and stop it at the end.

    If an exception was raised, its coroutines are cancelled.
    """
    with start_blocking_portal() as portal:
        yield BackgroundLoop(portal)
