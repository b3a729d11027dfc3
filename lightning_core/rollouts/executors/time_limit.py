"""The time limits of a rollout: one for the time of its agent, one for everything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
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
        """The deadline of what begins now. ``stalled``: seconds so far that it could not run for a reason outside it."""
        return Deadline(self, stalled)


class Deadline:
    """The end of what a rollout may take, which is later the longer it waits for others."""

    def __init__(self, limit: TimeLimit, stalled: Callable[[], float]) -> None:
        self._limit = limit
        self._stalled = stalled
        self._began = time.monotonic()
        self._waited_before, self._stalled_before = limit.waited(), stalled()

    def left(self) -> float:
        """The seconds until the first limit, if the rollout waits for nothing from now on."""
        passed = time.monotonic() - self._began
        own = passed - self._waited(passed)
        return min(self._limit.own - own, self._limit.whole - passed)

    def check(self) -> None:
        """Raise `TimeLimitError` or `WholeTimeLimitError` if the time is up."""
        if self.left() > 0:
            return
        passed = time.monotonic() - self._began
        if passed >= self._limit.whole:
            raise WholeTimeLimitError(self._limit.whole, waited=self._waited(passed))
        raise TimeLimitError(self._limit.own)

    async def within(
        self,
        work: Coroutine[Any, Any, Any] | asyncio.Future[Any],
        *,
        confirm: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """The result of ``work``, which is cancelled when the time is up. Raises as `check`.

        ``confirm``: awaited when the time seems to be up, before it is looked at again. It may raise another error.
        """
        inner = asyncio.ensure_future(work)
        seconds = min(self._limit.own, self._limit.whole)  # without what it waits, which takes time to read
        try:
            while True:
                done, _ = await asyncio.wait({inner}, timeout=max(seconds, _LEAST_SECONDS))
                if done:
                    return inner.result()
                if confirm is not None and self.left() <= 0:
                    await confirm()
                self.check()
                seconds = self.left()
        finally:
            inner.cancel()

    def _waited(self, passed: float) -> float:
        """The seconds of ``passed`` that the rollout waited for others.

        The two kinds of waiting are added: within a long interval they may follow each other, and the larger alone would blame the
        rollout for the smaller. Where they overlap, the sum may exceed what has passed.
        """
        waited = self._limit.waited() - self._waited_before
        return min(waited + self._stalled() - self._stalled_before, passed)
