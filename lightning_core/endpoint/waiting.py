"""The time that rollouts wait for the endpoint, which is not time of their agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_LONGEST_PAUSE = 60.0
"""Seconds of a pause before a retry that count as waiting. SDKs wait up to 8 s, or as long as ``retry-after`` says, at most 60 s."""
_INTERVAL = 0.01
_USUAL = 0.003
"""Seconds by which a loop that keeps up may be late."""


class LoopLag:
    """The total time that an event loop could not run its callbacks: it was busy, or its thread had no processor or no interpreter lock."""

    def __init__(self) -> None:
        self._total = 0.0
        self._due = float("inf")
        """The time of the next callback, by the monotonic clock."""

    async def watch(self) -> None:
        """Measure the running loop until cancelled."""
        try:
            while True:
                self._due = time.monotonic() + _INTERVAL
                await asyncio.sleep(_INTERVAL)
                self._total += self._late()
        finally:
            self._due = float("inf")

    def seconds(self) -> float:
        """The seconds so far. Thread-safe."""
        return self._total + self._late()

    def _late(self) -> float:
        late = time.monotonic() - self._due
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
        self._total = 0.0
        self.requests = 0
        """The number of requests being received or answered."""
        self._pausing = False
        self._since = time.monotonic()
        self._lag_since = lag()

    def begin(self) -> None:
        """A request arrives."""
        self._settle()
        self.requests += 1
        self._pausing = False

    def end(self, *, failed: bool) -> None:
        """A request is answered. ``failed``: for a reason outside the agent, so its client may retry it."""
        self._settle()
        self.requests -= 1
        self._pausing = failed

    def seconds(self) -> float:
        """The seconds so far."""
        return self._total + self._current()

    def _current(self) -> float:
        passed = time.monotonic() - self._since
        if self.requests:
            return passed
        return min(passed, max(self._lag() - self._lag_since, _LONGEST_PAUSE if self._pausing else 0.0))

    def _settle(self) -> None:
        self._total += self._current()
        self._since, self._lag_since = time.monotonic(), self._lag()
