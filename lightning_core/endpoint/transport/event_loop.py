"""The event loop of the endpoint, and the connections that its process may have."""

from __future__ import annotations

import asyncio
import resource

try:
    from uvloop import new_event_loop as _new_event_loop
except ImportError:  # PyPy has no uvloop
    from asyncio import new_event_loop as _new_event_loop


def new_event_loop(requests: int) -> asyncio.AbstractEventLoop:
    """An event loop for a server that has up to ``requests`` in progress.

    Raises the limit on the open files of this process as far as it may: a request needs one for its client and one for its model server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * requests + 1024
    if soft < needed and soft != resource.RLIM_INFINITY:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return _new_event_loop()
