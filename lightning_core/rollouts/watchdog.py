"""Names rollouts in which nobody makes progress, long before their time limit."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable

from lightning_core.errors import COUNTED, Repeats, plural
from lightning_core.rollouts.executors.executor import Running

logger = logging.getLogger(__name__)

_SHARE = 0.5
_LONGEST = 60.0
_IN_CALL = 5.0
"""A model call in progress may take longer than an agent without one: it may wait for others."""
_LEAST_PAUSE = 0.2
_UNANSWERED = "  the rollout ended before its process answered; it may hold Python's lock, or have had no processor"


class Watch:
    """The watch of one attempt."""

    def __init__(self) -> None:
        self.runs: asyncio.Task[None] | asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """End it."""
        if self.runs is not None:
            self.runs.cancel()


class Watchdog:
    """Logs the stacks and connections of the first rollout that is silent for half of its time limit, then of the 10th, the 100th …"""

    def __init__(self, limit: float) -> None:
        """``limit``: ``rollouts.timeout_seconds``."""
        self._limit = limit
        self._patience = min(_SHARE * limit, _LONGEST)
        self._silent = Repeats()

    def begin(self, task: str, running: Running, calls: Callable[[], tuple[int, float]]) -> Watch:
        """Start to `watch` one attempt. There is no task before it can have been silent for too long: most attempts are short."""
        watch, loop, began = Watch(), asyncio.get_running_loop(), time.monotonic()

        def start() -> None:
            watch.runs = loop.create_task(self.watch(task, running, calls, began=began))

        watch.runs = loop.call_later(self._patience, start, context=contextvars.Context())
        return watch

    async def watch(self, task: str, running: Running, calls: Callable[[], tuple[int, float]], *, began: float) -> None:
        """Watch one attempt, which ``began`` then, until it is cancelled, or is silent for too long.

        ``calls``: the number of model calls in progress, and the seconds since one began or ended.
        """
        while True:
            number, seconds = calls()
            seconds = min(seconds, time.monotonic() - began)
            left = self._patience * (_IN_CALL if number else 1.0) - seconds
            if left <= 0:
                break
            await asyncio.sleep(max(left, _LEAST_PAUSE))
        if (times := self._silent.count("silent")) is None:
            return
        stacks = _UNANSWERED
        try:
            stacks = await running.stacks()
        finally:
            logger.warning(
                "task %r: nobody has made progress for %.0f s%s (%s in progress; rollouts.timeout_seconds is %g). Give what it waits "
                "for a time-out of its own, or raise rollouts.timeout_seconds if it needs the time. Its agent:\n%s",
                task,
                seconds,
                times,
                plural(number, "model call"),
                self._limit,
                stacks,
                extra=COUNTED,
            )
