"""A bounded queue, and the thread that works on its items."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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
_IDLE_SECONDS = 3600.0


class BackgroundWork(Generic[T]):
    """Calls ``work`` with batches of items on a thread, which starts with the first item. `put` never waits.

    After an hour without an item, ``work`` is called without items.
    """

    def __init__(self, work: Callable[[Sequence[T]], None], pause_seconds: float = PAUSE_SECONDS) -> None:
        self._work = work
        self._pause_seconds = pause_seconds
        self._queue: SimpleQueue[tuple[T, int] | None] = SimpleQueue()
        # Reentrant: the garbage collector may add an item on a thread that holds it.
        self._changed = threading.Condition(threading.RLock())
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._items = self._bytes = self._done = self._failed = 0

    def put(self, item: T, size: int) -> bool:
        """Add an item of ``size`` bytes; return False if the queue is full or closed, or its thread cannot start."""
        if not self.start():
            return False
        with self._changed:
            if self._closing.is_set() or self._items >= MOST_ITEMS or self._bytes + size > MOST_BYTES:
                return False
            self._items += 1
            self._bytes += size
            self._queue.put((item, size))
        return True

    def start(self) -> bool:
        """Start the thread, unless that was done; return False if the queue is closed or the system has no more threads."""
        with self._changed:
            if self._thread is not None or self._closing.is_set():
                return self._thread is not None
            self._thread = thread = threading.Thread(target=self._run, name="lightning-record", daemon=True)
        try:
            with outside_rollout():
                thread.start()
        except RuntimeError:
            self._thread = None
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until the items that were added so far are done, at most ``seconds``; return whether they are."""
        with self._changed:
            added = self._done + self._items
            return self._changed.wait_for(lambda: self._done >= added, seconds)

    def close(self, seconds: float, release: Callable[[], None]) -> int:
        """Work on the items that wait, for at most ``seconds``; return how many are left, or were in a batch that failed.

        ``release`` closes what the work uses. It is not called if the thread still works.
        """
        with self._changed:  # no item comes after the end
            self._closing.set()
            self._queue.put(None)
        thread = self._thread
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join(seconds)
        if thread is None or (thread.ident is not None and not thread.is_alive()):
            release()
        return self._items + self._failed

    def _take(self) -> tuple[Sequence[tuple[T, int]], bool]:
        """The next batch, which is empty after an hour, and whether it is the last one."""
        batch: list[tuple[T, int]] = []
        with suppress(Empty):
            while len(batch) < _BATCH:
                if (entry := self._queue.get(not batch, _IDLE_SECONDS)) is None:
                    return batch, True
                if not batch:
                    self._closing.wait(self._pause_seconds)
                batch.append(entry)
        return batch, False

    def _run(self) -> None:
        ends = False
        while not ends:
            batch, ends = self._take()
            failed = 0
            try:
                self._work([item for item, _ in batch])
            except BaseException:  # the last place that can keep the thread
                failed = len(batch)
                logger.exception("a batch of %d recorded items failed", failed)
            with self._changed:
                self._failed += failed
                self._done += len(batch)
                self._items -= len(batch)
                self._bytes -= sum(size for _, size in batch)
                self._changed.notify_all()
