"""Counts what is logged repeatedly, so that a cause with thousands of effects takes a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class Repeats:
    """Counts by cause. Each power of ten is due to be logged."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def count(self, cause: Hashable) -> str | None:
        """The text to add to the message about ``cause``; None if it is not to be logged this time."""
        self._counts[cause] += 1
        number = self._counts[cause]
        if str(number).strip("0") != "1":
            return None
        return "" if number == 1 else f" ({number} times so far)"

    def clear(self) -> None:
        """Forget all causes."""
        self._counts.clear()
