"""A bounded queue, and the thread that works on its items."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from lightning_core.capture.context import outside_rollout

logger = logging.getLogger("lightning_core.tools.record")

T = TypeVar("T")

MOST_ITEMS = 10_000
"""Items that can wait."""
MOST_BYTES = 128 << 20
"""Bytes that can wait, with those of the item that is added."""
_BATCH = 512
PAUSE_SECONDS = 0.2
"""Before a batch: more items in a batch cost less."""


class BackgroundWork(Generic[T]):
    """Calls ``work`` with batches of items on a thread, which starts with the first item. `put` never waits.

    Once the queue is closed and `ended`, ``work`` is not called any more, so that what it uses can be closed.
    """

    def __init__(self, work: Callable[[Sequence[T]], None], pause_seconds: float = PAUSE_SECONDS) -> None:
        self._work = work
        self._pause_seconds = pause_seconds
        self._queue: SimpleQueue[tuple[T, int] | None] = SimpleQueue()
        # Reentrant: the garbage collector may add an item on a thread that holds it.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._idle = threading.Event()
        self._thread: threading.Thread | None = None
        self._items = self._bytes = self._failed = 0

    def put(self, item: T, size: int) -> bool:
        """Add an item of ``size`` bytes; return False if the queue is full or closed."""
        with self._lock:
            if self._closing.is_set() or self._items >= MOST_ITEMS or self._bytes + size > MOST_BYTES:
                return False
            self._items += 1
            self._bytes += size
            starts = self._thread is None
            if starts:
                self._thread = threading.Thread(target=self._run, name="lightning-record", daemon=True)
        self._queue.put((item, size))
        if starts and self._thread is not None:
            with outside_rollout():
                self._thread.start()
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until no item waits, at most ``seconds``; return whether that is so."""
        self._idle.clear()
        return not self._items or self._idle.wait(seconds)

    def close(self, seconds: float) -> int:
        """Work on the items that wait, for at most ``seconds``; return how many are left, or were in a batch that failed."""
        self._closing.set()
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join(seconds)
        return self._items + self._failed

    @property
    def ended(self) -> bool:
        """Whether the queue is closed, and its thread has ended or never started."""
        thread = self._thread
        is_over = thread is None or (thread.ident is not None and not thread.is_alive())
        return self._closing.is_set() and is_over

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            self._closing.wait(self._pause_seconds)
            batch, ends = [first], False
            try:
                while len(batch) < _BATCH:
                    if (more := self._queue.get_nowait()) is None:
                        ends = True
                        break
                    batch.append(more)
            except Empty:
                pass
            failed = 0
            try:
                self._work([item for item, _ in batch])
            except BaseException:  # the last place that can keep the thread
                failed = len(batch)
                logger.exception("a batch of %d recorded items failed", failed)
            with self._lock:
                self._failed += failed
                self._items -= len(batch)
                self._bytes -= sum(size for _, size in batch)
                if not self._items:
                    self._idle.set()
            if ends:
                return
