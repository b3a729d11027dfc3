"""Keeps event loops reading their connections when the garbage collector finds a client and its connections.

A transport of asyncio registers with its loop by the number of its file descriptor. Its finalizer closes the descriptor but keeps the
number, which the loop's next connection may get. The finalizer of an SDK's client schedules ``aclose`` on the collecting thread's loop,
often the endpoint's. Then ``aclose`` closes the transport, which removes the reader of the number: the response on the next connection is
never read (https://github.com/python/cpython/issues/130141). Here the finalizer of a transport also clears its number.
"""

from __future__ import annotations

from asyncio import selector_events, unix_events
from collections.abc import Callable
from typing import Any

from lightning_core.capture.patching import Patches, Wrapper

NO_DESCRIPTOR = 2**31 - 1
"""A number that Linux gives to no descriptor; selectors raise for -1."""


def _finalizer(number: str) -> Wrapper:
    """A wrapper of a transport's ``__del__`` that clears the attribute ``number``."""

    def finalize(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            wrapped(*args, **kwargs)
        finally:
            setattr(instance, number, NO_DESCRIPTOR)
            loop = getattr(instance, "_loop", None)
            if loop is not None and loop.is_closed():
                # Closing it later would only raise "Event loop is closed", on the collecting thread's loop.
                instance._closing = True
                instance._conn_lost = 1

    return finalize


# Private: seen in CPython 3.11 to 3.13.
_FINALIZERS = (
    (selector_events, "_SelectorTransport", _finalizer("_sock_fd")),
    (unix_events, "_UnixReadPipeTransport", _finalizer("_fileno")),
    (unix_events, "_UnixWritePipeTransport", _finalizer("_fileno")),
)


def install_transports(patches: Patches) -> None:
    """Clear the numbers of finalized transports until ``patches`` are undone, outside rollouts as well."""
    for module, transport, finalize in _FINALIZERS:
        patches.wrap(module, f"{transport}.__del__", finalize, everywhere=True)
