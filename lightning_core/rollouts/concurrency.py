"""The limit on rollouts that run at the same time.

A rollout that hangs until its time limit would hold its slot for minutes. A rollout that has been silent for longer than those that
ended well, with no model call in progress, gives its slot to another one and keeps running; after much longer, with a lower priority.
"""

from __future__ import annotations

import asyncio
import heapq
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager

from lightning_core.endpoint.activity import Silence
from lightning_core.rollouts.watchdog import Watch

_LONG_SHARE = 0.1
"""A silence is long, and its slot given up, after this share of a usual rollout's time: agents that hang then cost little throughput."""
_LEAST_LONG, _MOST_LONG = 0.01, 0.25
"""Seconds that limit it."""
_LONG_TIMES = 1.5
"""It is also so many times as long as a usual silence."""
_HANGS_SECONDS, _HANGS_TIMES = 0.25, 3.0
"""The seconds, and the multiple of a usual silence, after which the priority is lowered, which cannot be undone."""
_ENOUGH = 8
"""Rollouts that must have ended before a silence counts as long."""
_RECENT = 256
_EXTRA = 3.0
"""Most rollouts that have given up their slots, as a multiple of the slots."""
_MOST_POLL_SECONDS = 0.1
_POLL_SECONDS_PER_SLOT = 0.0005
"""The silences of many rollouts are asked for less often, so that it takes a small part of the loop's time."""


class Slot:
    """One of the slots, as one rollout holds it."""

    def __init__(self) -> None:
        self.silence: Callable[[], Silence] = _silent
        self.began = time.monotonic()
        """When the attempt began."""
        self.given_up = False
        self.slow_down: Callable[[], None] = _nothing
        self.slow = False
        self.watch: Watch | None = None
        """What watches the attempt that runs."""

    def begin(self, silence: Callable[[], Silence], slow_down: Callable[[], None]) -> None:
        """An attempt with that silence begins. ``slow_down``: lowers its priority."""
        self.silence, self.slow_down = silence, slow_down
        self.began, self.slow = time.monotonic(), False

    def end(self) -> None:
        """No attempt runs."""
        self.silence, self.slow_down = _silent, _nothing
        if self.watch is not None:
            self.watch.cancel()


def _silent() -> Silence:
    """No attempt runs."""
    return Silence(spoke=False, seconds=0.0)


def _nothing() -> None:
    """No attempt runs."""


class ConcurrencyLimit:
    """``count`` slots."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        # Who asks for one rollout at a time gets one.
        self._most_given_up = int(_EXTRA * count) if count > 1 else 0
        self._given_up = 0
        self._held: set[Slot] = set()
        self._durations: deque[float] = deque(maxlen=_RECENT)
        """The seconds of each rollout that ended well."""
        self._longest = [deque[float](maxlen=_RECENT), deque[float](maxlen=_RECENT)]
        """Their longest silences before the first call, which include the imports of a new worker, and after it."""

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
        """Add the attempt to the statistics."""
        self._durations.append(time.monotonic() - slot.began)
        spoke, seconds, longest = slot.silence()
        self._longest[spoke].append(max(longest[spoke], seconds))
        if spoke:
            self._longest[False].append(longest[False])

    async def watch(self) -> None:
        """Free the slots of silent rollouts, until cancelled."""
        while True:
            usual = [_usual(silences) for silences in self._longest]
            share = _LONG_SHARE * statistics.median(self._durations) if self._durations else 0.0
            long = min(max(share, _LEAST_LONG), _MOST_LONG)
            least = max(_LEAST_LONG / 2, _POLL_SECONDS_PER_SLOT * len(self._held))
            await asyncio.sleep(min(max(long / 4, least), _MOST_POLL_SECONDS))
            for slot in self._held:
                spoke, silence, _ = slot.silence()
                if silence > max(_HANGS_SECONDS, _HANGS_TIMES * usual[spoke]) and not slot.slow:
                    slot.slow = True
                    slot.slow_down()
                is_long = silence > max(long, _LONG_TIMES * usual[spoke])
                if is_long and not slot.given_up and self._given_up < self._most_given_up:
                    slot.given_up = True
                    self._given_up += 1
                    self._free.release()


def _usual(silences: Collection[float]) -> float:
    """The longest of ``silences`` without the longest 2 %; infinity if there are few."""
    return heapq.nlargest(1 + len(silences) // 50, silences)[-1] if len(silences) >= _ENOUGH else float("inf")
