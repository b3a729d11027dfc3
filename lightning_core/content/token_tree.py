"""Sequences of token ids, of which a common beginning is kept once.

The prompt of a call usually continues the prompt and the response of an earlier one. A sequence that goes on where another one ends extends
its branch; one that differs at a token forks there. So all calls of a conversation that only grows are parts of one array.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_core.trace import TokenIds

_SPARE = 16
"""A branch that grows gets room for a sixteenth more than it had: its ids are rarely copied, and little memory is unused."""


class _Branch:
    """Token ids after those of another branch, up to position ``start``, with which they make up whole sequences."""

    __slots__ = ("_data", "_whole", "forks", "length", "parent", "start")

    def __init__(self, parent: int, start: int, ids: TokenIds) -> None:
        self.parent = parent
        """The index of the branch that it forks from; -1 for the first one."""
        self.start = start
        self.forks: dict[int, int] | None = None
        """The index of the branch that forks here, by its position in this branch and its first id: ``position << 32 | id``."""
        self.length = len(ids)
        self._data = ids.copy()
        self._whole: weakref.ref[TokenIds] | None = None

    @property
    def ids(self) -> TokenIds:
        """Its own ids."""
        length = self.length  # before the array, which another thread may replace
        return self._data[:length]

    def part(self, start: int, stop: int) -> TokenIds:
        """Its own ids between two positions of the sequence."""
        return self._data[start - self.start : stop - self.start]

    def extend(self, ids: TokenIds) -> None:
        """Append ``ids``."""
        needed = self.length + len(ids)
        if needed > len(self._data):
            # Not resized in place: arrays that were read refer to the old one.
            data = np.empty(needed + self.length // _SPARE, dtype="<u4")
            data[: self.length] = self.ids
            self._data = data
        self._data[self.length : needed] = ids
        self.length = needed

    def whole(self, branches: Sequence[_Branch], stop: int) -> TokenIds:
        """Its sequence from the beginning, of at least ``stop`` ids."""
        if self.parent < 0:
            return self.ids
        known = None if self._whole is None else self._whole()
        if known is not None and len(known) >= stop:
            return known
        parts, branch, end = [self.ids], self, self.start
        while branch.parent >= 0:
            branch = branches[branch.parent]
            parts.append(branch.ids[: end - branch.start])
            end = branch.start
        whole: TokenIds = np.concatenate(parts[::-1])
        # Kept as long as an array of any call refers to it: reading all calls of a branch copies its ids once.
        self._whole = weakref.ref(whole)
        return whole


class TokenTree:
    """The sequences. One thread at a time adds to it; others may read meanwhile."""

    def __init__(self, branches: Sequence[tuple[int, int, TokenIds]] = ()) -> None:
        """``branches``: from `branches` of another tree."""
        self._branches = [_Branch(*branch) for branch in branches] or [_Branch(-1, 0, np.empty(0, dtype="<u4"))]
        self.size = sum(branch.length for branch in self._branches)
        """The number of ids that are kept."""

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenTree, (self.branches,)

    @property
    def branches(self) -> list[tuple[int, int, TokenIds]]:
        """The parent, the position and the ids of each branch."""
        return [(branch.parent, branch.start, branch.ids) for branch in self._branches]

    def add(self, ids: TokenIds) -> int:
        """Add the sequence ``ids``, uint32; return the index of the branch that ends with it or goes on after it."""
        index = 0
        while True:
            branch = self._branches[index]
            rest = ids[branch.start :]
            same = _equal_at_start(branch.ids, rest)
            if same == len(rest):
                return index
            if same == branch.length:
                branch.extend(rest[same:])
                self.size += len(rest) - same
                return index
            branch.forks = {} if branch.forks is None else branch.forks
            fork = same << 32 | int(rest[same])
            if fork not in branch.forks:
                self._branches.append(_Branch(index, branch.start + same, rest[same:]))
                branch.forks[fork] = len(self._branches) - 1
                self.size += len(rest) - same
                return branch.forks[fork]
            index = branch.forks[fork]

    def extend(self, index: int, parent: int, start: int, ids: TokenIds) -> None:
        """Append ``ids`` to a branch of a copy, which may be new; see `branches`. Nothing else may be added to a copy."""
        if index == len(self._branches):
            self._branches.append(_Branch(parent, start, ids))
        else:
            self._branches[index].extend(ids)
        self.size += len(ids)

    def read(self, index: int, start: int, stop: int) -> TokenIds:
        """The ids from ``start`` to ``stop`` of the sequence of a branch, read-only; a copy only if they lie in several branches."""
        branch = self._branches[index]
        if start >= branch.start:
            ids = branch.part(start, stop)
        else:
            ids = branch.whole(self._branches, stop)[start:stop]
        ids.flags.writeable = False
        return ids


def _equal_at_start(a: TokenIds, b: TokenIds) -> int:
    """The number of ids with which both begin."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter
