"""Counts what is logged repeatedly, so that a cause with thousands of effects takes a few lines."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable


class Repeats:
    """Counts by cause. Each power of ten is due to be logged. Thread-safe; a forked child must call `clear`."""

    def __init__(self) -> None:
        self.clear()

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
        self._lock = (
            threading.RLock()
        )  # reentrant for finalizers and signal handlers; another thread may hold it during a fork
        self._counts: Counter[Hashable] = Counter()
