"""The limit on rollouts that run at the same time.

A rollout that hangs until its time limit would hold its slot for minutes. A rollout that has been silent for much longer than those
that ended well, with no model call in progress, gives its slot to another one and keeps running, with a lower priority.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

_MIN_SILENCE_SECONDS = 0.25
_TIMES_LONGEST = 3.0
"""The factor by which a silence must be longer than usual."""
_ENOUGH = 8
"""Rollouts that must have ended before a silence counts as long."""
_RECENT = 256
_EXTRA = 3.0
"""Most rollouts that have given up their slots, as a multiple of the slots."""
_POLL_SECONDS = 0.1


class Slot:
    """One of the slots, as one rollout holds it."""

    def __init__(self) -> None:
        self.silence: Callable[[], float] = float
        """Seconds since the rollout last called a model or recorded something; 0 during a model call."""
        self.longest = 0.0
        self.given_up = False
        self.slow_down: Callable[[], None] = _nothing
        self.slow = False
        self.watch: asyncio.Task[None] | None = None
        """What watches the attempt that runs."""

    def begin(self, silence: Callable[[], float], slow_down: Callable[[], None]) -> None:
        """An attempt with that silence begins. ``slow_down``: lowers its priority."""
        self.slow_down = slow_down
        began = time.monotonic()
        self.silence = lambda: min(silence(), time.monotonic() - began)
        self.longest, self.slow = 0.0, False

    def end(self) -> None:
        """No attempt runs."""
        self.silence, self.slow_down = float, _nothing
        if self.watch is not None:
            self.watch.cancel()


def _nothing() -> None:
    """No attempt runs."""


class ConcurrencyLimit:
    """``count`` slots."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._most_given_up = int(_EXTRA * count)
        self._given_up = 0
        self._held: set[Slot] = set()
        self._longest: deque[float] = deque(maxlen=_RECENT)
        """The longest silence of each rollout that ended well."""

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[Slot]:
        """Wait for a slot, and hold it for the body."""
        await self._free.acquire()
        slot = Slot()
        self._held.add(slot)
        try:
            yield slot
        finally:
            self._held.discard(slot)
            if slot.given_up:
                self._given_up -= 1
            else:
                self._free.release()

    def ended_well(self, slot: Slot) -> None:
        """Add the attempt's longest silence to the statistics."""
        self._longest.append(max(slot.longest, slot.silence()))

    async def watch(self) -> None:
        """Free the slots of silent rollouts, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if len(self._longest) >= _ENOUGH:
                usual = heapq.nlargest(1 + len(self._longest) // 50, self._longest)[-1]
                limit = max(_MIN_SILENCE_SECONDS, _TIMES_LONGEST * usual)
            else:
                limit = float("inf")
            for slot in self._held:
                silence = slot.silence()
                slot.longest = max(slot.longest, silence)
                if silence <= limit:
                    continue
                if not slot.slow:
                    slot.slow = True
                    slot.slow_down()
                if not slot.given_up and self._given_up < self._most_given_up:
                    slot.given_up = True
                    self._given_up += 1
                    self._free.release()
