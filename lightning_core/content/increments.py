"""What is added to the contents of a rollout in one process, for a copy of them in another one. The indices of both are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_core.content.shared_content import SharedContent


class Increment(NamedTuple):
    """What was added; JSON values, and the bytes of the token ids and the texts."""

    values: Sequence[Any]
    data: bytes


class Increments:
    """Takes from ``content`` what is new since it was last called. One thread at a time."""

    def __init__(self, content: SharedContent) -> None:
        self.content = content
        self._texts = 0
        self._nodes = 1
        self._lengths: list[int] = []

    def take(self) -> Increment:
        """What is new. It has all that is referred to by a call that was added before."""
        parents, contents, texts = self.content.conversations()
        branches: list[tuple[int, int, int, int]] = []
        parts: list[bytes] = []
        for index, (parent, start, ids) in enumerate(self.content.tokens.branches):
            if index == len(self._lengths):
                self._lengths.append(0)
            elif len(ids) == self._lengths[index]:
                continue
            new = ids[self._lengths[index] :]
            self._lengths[index] = len(ids)
            branches.append((index, parent, start, len(new)))
            parts.append(new.tobytes())
        new_texts = texts[self._texts :]
        values = [branches, parents[self._nodes :], contents[self._nodes :], [len(text) for text in new_texts]]
        self._texts, self._nodes = len(texts), len(parents)
        return Increment(values, b"".join((*parts, *new_texts)))


def extend(content: SharedContent, increment: Increment) -> None:
    """Add ``increment`` to the copy ``content``, which has all earlier ones."""
    branches, parents, contents, sizes = increment.values
    data, end = memoryview(increment.data), 0

    def take(size: int) -> memoryview:
        nonlocal end
        end += size
        return data[end - size : end]

    for index, parent, start, length in branches:
        content.tokens.extend(index, parent, start, np.frombuffer(take(4 * length), "<u4"))
    content.extend([bytes(take(size)) for size in sizes], parents, contents)
