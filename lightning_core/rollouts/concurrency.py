"""The limit on rollouts that run at the same time.

A rollout that hangs until its time limit would hold its slot for minutes. A rollout that has been silent for longer than those that
ended well, with no model call in progress, gives its slot to another one and keeps running; after much longer, with a lower priority.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager

_LONG_SECONDS, _LONG_TIMES = 0.01, 1.5
"""A silence is long, and its slot given up, after so many seconds and so many times the usual silence. A mistake costs little: for a
while one rollout more than `count` runs."""
_HANGS_SECONDS, _HANGS_TIMES = 0.25, 3.0
"""The same for the lower priority, which cannot be undone."""
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
        self.silence: Callable[[], tuple[bool, float]] = _silent
        """Whether the attempt has called a model or recorded something, and the seconds since, or since it began; 0 during a model call."""
        self.longest = [0.0, 0.0]
        """The longest silence before the first call or record, and after it."""
        self.given_up = False
        self.slow_down: Callable[[], None] = _nothing
        self.slow = False
        self.watch: asyncio.Task[None] | None = None
        """What watches the attempt that runs."""

    def begin(self, silence: Callable[[], float], slow_down: Callable[[], None]) -> None:
        """An attempt begins. ``silence``: its seconds since a call or a record. ``slow_down``: lowers its priority."""
        self.slow_down = slow_down
        began = time.monotonic()

        def find() -> tuple[bool, float]:
            seconds, whole = silence(), time.monotonic() - began
            return seconds < whole, min(seconds, whole)

        self.silence = find
        self.longest, self.slow = [0.0, 0.0], False

    def end(self) -> None:
        """No attempt runs."""
        self.silence, self.slow_down = _silent, _nothing
        if self.watch is not None:
            self.watch.cancel()


def _silent() -> tuple[bool, float]:
    """No attempt runs."""
    return False, 0.0


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
        self._longest = [deque[float](maxlen=_RECENT), deque[float](maxlen=_RECENT)]
        """The longest silences of each rollout that ended well. Those before the first call include the imports of a new worker."""

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
        """Add the attempt's longest silences to the statistics."""
        spoke, seconds = slot.silence()
        slot.longest[spoke] = max(slot.longest[spoke], seconds)
        for silences, longest in zip(self._longest[: 1 + spoke], slot.longest, strict=False):
            silences.append(longest)

    async def watch(self) -> None:
        """Free the slots of silent rollouts, until cancelled."""
        while True:
            usual = [_usual(silences) for silences in self._longest]
            least = max(_LONG_SECONDS / 2, _POLL_SECONDS_PER_SLOT * len(self._held))
            await asyncio.sleep(min(max(min(usual) / 4, least), _MOST_POLL_SECONDS))
            for slot in self._held:
                spoke, silence = slot.silence()
                slot.longest[spoke] = max(slot.longest[spoke], silence)
                if silence > max(_HANGS_SECONDS, _HANGS_TIMES * usual[spoke]) and not slot.slow:
                    slot.slow = True
                    slot.slow_down()
                long = silence > max(_LONG_SECONDS, _LONG_TIMES * usual[spoke])
                if long and not slot.given_up and self._given_up < self._most_given_up:
                    slot.given_up = True
                    self._given_up += 1
                    self._free.release()


def _usual(silences: Collection[float]) -> float:
    """The longest of ``silences`` without the longest 2 %; infinity if there are few."""
    return heapq.nlargest(1 + len(silences) // 50, silences)[-1] if len(silences) >= _ENOUGH else float("inf")
