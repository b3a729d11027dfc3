"""Finds where an import starts its first thread."""

from __future__ import annotations

import functools
import os
import threading
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

_SKIPPED = ("<frozen", "lightning_core/", "/threading.py", "/concurrent/futures/")


@contextmanager
def before_first_thread(stop: Callable[[str], None]) -> Generator[None]:
    """Call ``stop`` once, on the thread that starts the first `threading.Thread` of the body, before it starts.

    Its argument names the thread and the line. For a process of its own: the methods stay wrapped, which costs nothing afterwards,
    because others may have wrapped them since.
    """
    waiting = [stop]
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    @functools.wraps(start)
    def stopping(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
        if waiting:
            waiting.pop()(f"the thread {self.name!r} ({_caller()})")
        start(self, *args, **kwargs)

    # A pool starts its threads while it holds a lock that every fork waits for.
    @functools.wraps(submit)
    def stopping_pool(self: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Any:
        if waiting:
            waiting.pop()(f"a thread of a pool ({_caller()})")
        return submit(self, *args, **kwargs)

    threading.Thread.start, ThreadPoolExecutor.submit = stopping, stopping_pool
    try:
        yield
    finally:
        waiting.clear()


def starts_after_fork() -> bool:
    """Whether a thread that was created before a fork can start in the child; in CPython 3.13.0 it cannot (gh-134381)."""
    thread = threading.Thread(target=int)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            thread.start()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _caller() -> str:
    """The line that starts the thread."""
    stack = traceback.extract_stack()
    line = next((f for f in reversed(stack) if not any(part in f.filename for part in _SKIPPED)), stack[-1])
    return f"{line.filename}:{line.lineno}"
