"""The room that the blocks of a ragged batch have, and how it grows."""

from __future__ import annotations

from typing import NamedTuple

_SPARE, _TIGHT_SPARE = 32, 8
"""Columns that new blocks have room for in addition, at least, and in little memory. A copy of the blocks costs about as much as a step,
which reads them."""


class Extent(NamedTuple):
    """The rows and columns that blocks have room for."""

    rows: int
    base: int
    """The first column."""
    columns: int

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    def grown(self, rows: int, first: int, end: int, *, tight: bool) -> Extent:
        """The extent that has room for ``rows`` rows and the columns from ``first`` to ``end``; the same if this one has.

        ``tight``: with as little room for further ones as possible.
        """
        if first < self.base or end > self.base + self.columns:
            # All is copied, so rows that have left need no room any more.
            return Extent(rows, first, end - first + (_TIGHT_SPARE if tight else max(_SPARE, (end - first) // 8)))
        if rows > self.rows:
            return Extent(rows if tight else max(rows, self.rows * 5 // 4), first, self.columns)
        return self

    def trimmed(self, rows: int, first: int, end: int) -> Extent:
        """The extent that has little more than ``rows`` rows and the columns from ``first`` to ``end``; the same if this is no larger."""
        least = Extent(rows, first, end - first + _TIGHT_SPARE)
        return least if least.cells < self.cells else self
