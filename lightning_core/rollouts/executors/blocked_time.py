"""The time that agents lose because others block the event loop that they share."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_core.endpoint.waiting import LoopLag

RolloutEnd = asyncio.Future[Any]
"""A rollout on the loop, as the runner's future of its result."""


@dataclass(frozen=True, slots=True)
class _Sight:
    """A look at a loop that was late."""

    late_since: float
    blocker: RolloutEnd | None
    at: float
    starved: float


class BlockedTime:
    """The time that an event loop could not run its callbacks, without what each rollout on it has blocked itself, as far as is known.

    A rollout has blocked the loop for the time between two looks if it runs at both, and the loop has run nothing else between. What was
    not seen is nobody's. Used by the runner's loop, but for `lag`.
    """

    def __init__(self, blocker: Callable[[], RolloutEnd | None], starved: Callable[[], float]) -> None:
        """``blocker``: the rollout whose code runs on the loop, if that is known. ``starved``: seconds so far that the loop's thread
        had no processor.
        """
        self.lag = LoopLag()
        """To be started and stopped on the loop."""
        self._blocker = blocker
        self._starved = starved
        self._own: weakref.WeakKeyDictionary[RolloutEnd, float] = weakref.WeakKeyDictionary()
        self._unknown = 0.0
        """Seconds of the present lateness whose cause is not known."""
        self._last: _Sight | None = None

    def of(self, rollout: RolloutEnd) -> float:
        """The seconds so far that ``rollout`` could not run, because of others or for want of a processor.

        A block whose cause is not known counts when it is over: until then, it may be one that does not end, and time limits find it.
        """
        self._look()
        blocked = self.lag.seconds() - self._own.get(rollout, 0.0) - self._unknown
        return max(blocked, self._starved())

    def _look(self) -> None:
        since, last = self.lag.late_since(), self._last
        if since is None or last is None or last.late_since != since:
            self._unknown = 0.0
        if since is None:
            self._last = None
            return
        sight = _Sight(since, self._blocker(), time.monotonic(), self._starved())
        self._last = sight
        if last is None or last.late_since != since or last.blocker is not sight.blocker:
            return
        seen = max(sight.at - last.at - (sight.starved - last.starved), 0.0)
        if sight.blocker is None:
            self._unknown += seen
        else:
            self._own[sight.blocker] = self._own.get(sight.blocker, 0.0) + seen
