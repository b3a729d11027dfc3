"""Identifies the current thread and asyncio task.

Identifiers of threads and of objects are reused, so neither distinguishes them.
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


INHERITS = "_lightning_inherits"
"""Attribute of a thread that was started in a scope, and runs in it."""


def current_worker() -> threading.Thread | asyncio.Task[Any] | None:
    """The current task, or the thread if it was started in a scope. None in other threads, which run what they are given."""
    loop = asyncio._get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    if task is not None:
        return task
    thread = threading.current_thread()
    return thread if hasattr(thread, INHERITS) else None


def is_running(worker: threading.Thread | asyncio.Task[Any]) -> bool:
    """Whether a task or thread has not ended."""
    return worker.is_alive() if isinstance(worker, threading.Thread) else not worker.done()


def name_of(worker: threading.Thread | asyncio.Task[Any]) -> str:
    """Display name of a task or thread."""
    kind, name = ("thread", worker.name) if isinstance(worker, threading.Thread) else ("task", worker.get_name())
    return f"{kind} {name!r}"
