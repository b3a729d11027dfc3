"""Finds a sampling thread that hangs or has ended, so nothing waits for it without a limit."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TypeVar

from lightning_core.errors import InfrastructureError

T = TypeVar("T")

_POLL_SECONDS = 10.0


class StepWatch:
    """The time of the current step of ``thread``."""

    limit = 1800.0
    """Seconds after which a step hangs; no pass over a step's prompt tokens takes as long."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._began: float | None = None

    def start(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def stop(self) -> None:
        """The step has ended."""
        self._began = None

    @property
    def stepping(self) -> bool:
        """Whether a step is in progress."""
        return self._began is not None

    def left(self) -> float:
        """Seconds until the current step hangs; the limit between steps."""
        return self.limit if self._began is None else max(0.0, self._began + self.limit - time.monotonic())

    def check(self) -> None:
        """Raise `InfrastructureError` if the thread hangs or has ended."""
        if self.left() and (self._thread.is_alive() or self._thread.ident is None):
            return
        state = f"has not finished a step in {self.limit:g} s" if self._thread.is_alive() else "has ended"
        raise InfrastructureError(
            f"the sampling thread {state}; resume the run. If it happens again, look for the cause in the stacks of the process (py-spy "
            "dump), or sample on another device (policy.device)"
        )

    async def next_item(self, queue: asyncio.Queue[T]) -> T:
        """The next item of ``queue``, which the thread fills. Raises as `check`."""
        while True:
            with suppress(TimeoutError):
                return await asyncio.wait_for(queue.get(), min(_POLL_SECONDS, self.limit))
            self.check()
