"""The order in which waiting rows start."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from lightning_core.backends.torch.kv_pool import TokenArray
from lightning_core.backends.torch.rows import ActiveRow

_OLDEST_EVERY = 4
"""One of so many rows that start is the one that was submitted first, even if nothing of it is cached, so that no row waits for long. Fewer
of them saved hardly any tokens in docs/benchmarks.md."""


class WaitingOrder:
    """Rows with the longest cached contexts start first, so conversations end before others begin.

    In the order of arrival, conversations that do not fit the cache together would drop each other's contexts between two turns, and all
    of them would be computed again and again.
    """

    def __init__(self) -> None:
        self._oldest: ActiveRow | None = None
        """The waiting row that was submitted first."""
        self._since_oldest = 0
        """Rows that have started since that one did."""
        self._ordered = (0, 0)
        """The numbers of waiting and running rows for which the former are in order."""

    def arrange(self, waiting: deque[ActiveRow], running: int, known: Callable[[TokenArray, str | None], int]) -> None:
        """Order ``waiting``, to which other threads may append; rows with equal cached contexts keep their order.

        ``running``: number of running rows. ``known``: the length of the longest cached prefix of tokens, with an adapter.
        """
        numbers = (len(waiting), running)
        if len(waiting) < 2 or numbers == self._ordered:  # none came or left since the step before
            return
        self._ordered = numbers
        rows = [waiting.popleft() for _ in range(len(waiting))]
        try:
            rows.sort(key=lambda row: -known(row.context()[:-1], row.adapter))
            self._oldest = min(rows, key=lambda row: row.number)
            if self._since_oldest >= _OLDEST_EVERY:
                rows.remove(self._oldest)
                rows.insert(0, self._oldest)
        finally:
            waiting.extendleft(reversed(rows))

    def started(self, rows: Collection[ActiveRow], *, waiting: int, running: int) -> None:
        """``rows`` have started; ``waiting`` and ``running`` are the numbers now."""
        self._since_oldest = 0 if self._oldest in rows else self._since_oldest + len(rows)
        self._ordered = (waiting, running)
