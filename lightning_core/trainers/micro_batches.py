"""Reports of the micro-batches of a step that are done."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

OnBatch = Callable[[int, int], None]
"""Called with the number of micro-batches of a step that are done, 0 at its start, and the number of all."""


def ignore_batches(done: int, total: int, /) -> None:
    """An `OnBatch` that does nothing."""


def counting(on_batch: OnBatch, total: int) -> Callable[[], None]:
    """Start a step of ``total`` micro-batches; returns what to call after each."""
    done = count()
    on_batch(next(done), total)
    return lambda: on_batch(next(done), total)
