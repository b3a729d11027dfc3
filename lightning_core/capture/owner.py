"""Who runs: the current thread and asyncio task.

Neither identifiers of threads nor those of objects will do: both are reused.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from typing import Any

Owner = tuple[int, weakref.ref[asyncio.Task[Any]] | None]
"""A number for the thread, and the task."""

_numbers = itertools.count(1)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.number = next(_numbers)


_thread = _Thread()


def current_owner() -> Owner:
    """The current thread and task; equal as long as both are the same."""
    loop = asyncio._get_running_loop()  # unlike `asyncio.current_task`, it does not raise in a thread without one
    task = None if loop is None else asyncio.current_task(loop)
    return _thread.number, None if task is None else weakref.ref(task)
