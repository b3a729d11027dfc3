"""The time that rollouts wait for the endpoint, which is not time of their agents."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable

_LONGEST_PAUSE = 60.0
"""Seconds of a pause before a retry that count as waiting. SDKs wait up to 8 s, or as long as ``retry-after`` says, at most 60 s."""
_INTERVAL = 0.01
_USUAL = 0.003
"""Seconds by which a loop that keeps up may be late."""


class LoopLag:
    """The total time that an event loop could not run its callbacks: it was busy, or its thread had no processor or no interpreter lock.

    Measured by a timer, not by a task: agents on the loop may list, await or cancel all of its tasks. Written by the loop, read by any
    thread.
    """

    def __init__(self) -> None:
        self._now = (0.0, float("inf"))
        """The total, and the time of the next callback by the monotonic clock: one value, so that no reader sees half of a change."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure ``loop`` until `stop`. On its thread, or before it runs."""
        self._now = (self._now[0], time.monotonic() + _INTERVAL)
        self._timer = loop.call_later(_INTERVAL, self._look, loop, context=contextvars.Context())

    def stop(self) -> None:
        """Measure no longer. On the thread of the loop, or when it runs no longer."""
        if self._timer is not None:
            self._timer.cancel()
        self._now = (self.seconds(), float("inf"))

    def seconds(self) -> float:
        """The seconds so far. Thread-safe."""
        total, due = self._now
        return total + _late(due)

    def late_since(self) -> float | None:
        """The time since which the loop is late now, by the monotonic clock. Thread-safe."""
        _, due = self._now
        return due if _late(due) else None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._now = (self.seconds(), float("inf"))
        self.start(loop)


def _late(due: float) -> float:
    late = time.monotonic() - due
    return late if late > _USUAL else 0.0


class WaitingTime:
    """The wall time in which one rollout waited for the endpoint.

    It waits while a request is in progress, in its client's pause before the retry of a failed one, and while the endpoint's event loop is
    late: a request that it has not read yet waits then, and so do agents that share its process. Written by the endpoint's loop, read by
    any thread.
    """

    def __init__(self, lag: Callable[[], float] = float) -> None:
        """``lag``: the total lag of the endpoint's loop, in seconds."""
        self._lag = lag
        self._now = (0.0, time.monotonic(), lag(), 0.0)
        """The total until a time, that time, the lag then, and the seconds from then on that count in any case.

        One value, so that no reader sees half of a change.
        """
        self.requests = 0
        """The number of requests being received or answered."""

    def begin(self) -> None:
        """A request arrives."""
        self.requests += 1
        self._settle(float("inf"))

    def end(self, *, failed: bool) -> None:
        """A request is answered. ``failed``: for a reason outside the agent, so its client may retry it."""
        self.requests -= 1
        self._settle(float("inf") if self.requests else _LONGEST_PAUSE if failed else 0.0)

    def seconds(self) -> float:
        """The seconds so far."""
        return self._at(time.monotonic(), self._lag())

    def state(self) -> tuple[int, float, float, float, float]:
        """Its numbers, for `restore` of a copy in another process."""
        return self.requests, *self._now

    def restore(self, requests: int, *now: float) -> None:
        """Take over the numbers of `state`. The copy's ``lag`` is that of the same event loop."""
        total, since, lag, counted = now
        self.requests, self._now = requests, (total, since, lag, counted)

    def _at(self, now: float, lag: float) -> float:
        total, since, lag_since, counted = self._now
        return total + min(max(now - since, 0.0), max(lag - lag_since, counted))

    def _settle(self, counted: float) -> None:
        now, lag = time.monotonic(), self._lag()
        self._now = (self._at(now, lag), now, lag, counted)
