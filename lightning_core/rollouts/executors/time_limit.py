"""The time limits of a rollout: one for the time of its agent, one for everything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from lightning_core.errors import TimeLimitError, WholeTimeLimitError

_LEAST_SECONDS = 0.02
"""The shortest sleep between two looks at the time that is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The limits of an agent, and of its reward function."""

    own: float
    """``rollouts.timeout_seconds``: the agent's time, in seconds of the clock without what it waits for."""
    whole: float
    """``rollouts.total_seconds``: all its time, in seconds of the clock."""
    waited: Callable[[], float] = float
    """The seconds that the rollout has waited for model calls so far."""

    def begin(self, stalled: Callable[[], float] = float) -> Deadline:
        """The deadline of what begins now. ``stalled``: seconds that it has waited for a processor so far."""
        return Deadline(self, stalled)


class Deadline:
    """The end of what a rollout may take, which is later the longer it waits for others."""

    def __init__(self, limit: TimeLimit, stalled: Callable[[], float]) -> None:
        self._limit = limit
        self._waited = lambda: limit.waited() + stalled()
        self._began = time.monotonic()
        self._waited_before = self._waited()

    def left(self) -> float:
        """The seconds until the first limit, if the rollout waits for nothing from now on."""
        passed = time.monotonic() - self._began
        own = passed - (self._waited() - self._waited_before)
        return min(self._limit.own - own, self._limit.whole - passed)

    def check(self) -> None:
        """Raise `TimeLimitError` or `WholeTimeLimitError` if the time is up."""
        if self.left() > 0:
            return
        passed = time.monotonic() - self._began
        if passed >= self._limit.whole:
            raise WholeTimeLimitError(self._limit.whole, waited=self._waited() - self._waited_before)
        raise TimeLimitError(self._limit.own)

    async def within(self, work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> Any:
        """The result of ``work``, which is cancelled when the time is up. Raises as `check`."""
        inner = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({inner}, timeout=max(self.left(), _LEAST_SECONDS))
                if done:
                    return inner.result()
                self.check()
        finally:
            inner.cancel()
