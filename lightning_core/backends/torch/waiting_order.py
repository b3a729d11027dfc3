"""The order in which waiting rows start."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from lightning_core.backends.torch.kv_pool import TokenArray
from lightning_core.backends.torch.rows import ActiveRow

_OLDEST_EVERY = 4
"""One of so many rows that start is the one that was submitted first, even if nothing of it is cached, so that no row waits for long."""


class WaitingOrder:
    """Rows with the longest cached contexts start first, so conversations end before others begin.

    In the order of arrival, conversations that do not fit the cache together would drop each other's contexts between two turns, and all
    of them would be computed again and again. Responses that were interrupted come before those that have not begun.
    """

    def __init__(self) -> None:
        self._started = 0
        """Number of rows that have started."""
        self._arranged: tuple[int, int] | None = None
        """The numbers of waiting and running rows for which the former are in order; None: they are not."""

    def arrange(self, waiting: deque[ActiveRow], running: int, known: Callable[[TokenArray, str | None], int]) -> None:
        """Order ``waiting``, to which other threads may append, and remove aborted rows. Equal rows keep their order.

        ``running``: number of running rows. ``known``: the length of the longest cached prefix of tokens, with an adapter.
        """
        if (len(waiting), running) == self._arranged:  # none came or left since the step before
            return
        rows = [waiting.popleft() for _ in range(len(waiting))]
        try:
            live = list(dict.fromkeys(row for row in rows if not row.aborted))
            first = sorted(live, key=lambda row: (not row.tokens, -known(row.context()[:-1], row.adapter)))
            rows = list(self._with_oldest(first, sorted(live, key=lambda row: row.number)))
        finally:
            waiting.extendleft(reversed(rows))
        self._arranged = len(rows), running

    def started(self, number: int) -> None:
        """That many rows have started, which may have changed what is cached."""
        if number:
            self._started += number
            self._arranged = None

    def _with_oldest(self, first: Sequence[ActiveRow], by_age: Sequence[ActiveRow]) -> Iterator[ActiveRow]:
        """The rows in the order of ``first``, but one in `_OLDEST_EVERY` is the next one ``by_age``."""
        taken: set[ActiveRow] = set()
        orders = (iter(first), iter(by_age))
        for place in range(self._started + 1, self._started + 1 + len(first)):
            row = next(row for row in orders[place % _OLDEST_EVERY == 0] if row not in taken)
            taken.add(row)
            yield row
