"""Counts what is logged repeatedly, so a cause with thousands of effects takes a few lines."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping

COUNTED: Mapping[str, object] = {"is_counted": True}
"""The ``extra`` of a message whose repeats are counted with `Repeats`, so `FirstOfEach` prints each one."""


class Repeats:
    """Counts by cause. Each power of ten is due to be logged. Thread-safe. A forked child counts from 0."""

    def __init__(self) -> None:
        self.clear()
        _of_process.add(self)

    def count(self, cause: Hashable, times: int = 1) -> str | None:
        """Count ``cause``; return the text to add to the message about it, or None if it is not to be logged this time."""
        with self._lock:
            before = self._counts[cause]
            number = self._counts[cause] = before + times
        if before and len(str(number)) == len(str(before)):
            return None
        return "" if number == 1 else f" ({number} times so far)"

    def clear(self) -> None:
        """Forget all causes."""
        self._lock = threading.RLock()  # reentrant for finalizers and signal handlers
        self._counts: Counter[Hashable] = Counter()


_of_process: weakref.WeakSet[Repeats] = weakref.WeakSet()


def _clear_in_child() -> None:
    for repeats in tuple(_of_process):
        repeats.clear()  # a thread of the parent may hold its lock


if hasattr(os, "register_at_fork"):  # POSIX
    os.register_at_fork(after_in_child=_clear_in_child)
