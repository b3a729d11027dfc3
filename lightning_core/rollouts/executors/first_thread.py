"""Finds where an import starts its first thread."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

FORKS_BEFORE_THREADS = not (3, 13) <= sys.version_info < (3, 13, 4)
"""Whether a thread that was created before a fork can start in the child. In these versions of CPython it cannot (gh-134381)."""
_SKIPPED = ("<frozen", "lightning_core/", "/threading.py")


@contextmanager
def before_first_thread(stop: Callable[[str], None]) -> Generator[None]:
    """Call ``stop`` once, on the thread that starts the first `threading.Thread` of the body, before it starts.

    Its argument names the thread and the line. For a process of its own: `Thread.start` stays wrapped, which costs nothing afterwards,
    because others may have wrapped it since.
    """
    waiting = [stop]
    start = threading.Thread.start

    @functools.wraps(start)
    def stopping(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
        if waiting:
            waiting.pop()(f"the thread {self.name!r} ({_caller()})")
        start(self, *args, **kwargs)

    threading.Thread.start = stopping
    try:
        yield
    finally:
        waiting.clear()


def _caller() -> str:
    """The line that starts the thread."""
    stack = traceback.extract_stack()
    line = next((f for f in reversed(stack) if not any(part in f.filename for part in _SKIPPED)), stack[-1])
    return f"{line.filename}:{line.lineno}"
