"""Group commit: items that arrive during a write share the next one, and with it one wait for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class GroupCommit(Generic[T]):
    """Calls ``write`` on its own thread, each time with all items that wait. Thread-safe."""

    def __init__(
        self, write: Callable[[Sequence[T]], object], *, storage_errors: tuple[type[Exception], ...] = (OSError,)
    ) -> None:
        """``write``: writes all items durably, or raises and writes none; a second call reads the items again.

        ``storage_errors``: failures of the storage, which fail all items of the write. After any other error, items that were
        added separately are written separately, so an invalid one is lost alone.
        """
        self._write = write
        self._storage_errors = storage_errors
        self._waiting: list[tuple[Sequence[T], Future[None]]] = []
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lightning-store")

    def add(self, items: Sequence[T]) -> Future[None]:
        """Queue ``items`` and return at once. The future is done when they are written; it cannot be cancelled."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        with self._lock:
            if not self._waiting:  # further ones go with the first
                self._writer.submit(self._write_waiting)
            self._waiting.append((items, done))
        return done

    def close(self) -> None:
        """Write what waits, and end the thread. Closing twice does nothing."""
        self._writer.shutdown()

    def _write_waiting(self) -> None:
        with self._lock:
            batch, self._waiting = self._waiting, []
        if batch:
            self._settle(batch)

    def _settle(self, batch: Sequence[tuple[Sequence[T], Future[None]]]) -> None:
        try:
            self._write([item for items, _ in batch for item in items])
        except Exception as error:  # noqa: BLE001 - raised by the future
            if len(batch) > 1 and not isinstance(error, self._storage_errors):
                for entry in batch:
                    self._settle([entry])
                return
            for _, done in batch:
                done.set_exception(error)
        else:
            for _, done in batch:
                done.set_result(None)
