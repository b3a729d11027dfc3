"""Holds sampling back while the weights of a server change, in this process and in others that sample from the same server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from lightning_core.backends.backend import Backend
from lightning_core.errors import InfrastructureError

POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """Whether sampling is allowed, and from which version of the weights."""

    version: int = 0
    held: bool = False
    holds: int = 0
    """The number of times that it was held."""
    broken: str | None = None
    """Why sampling is no longer possible; None if it is."""


class Gate:
    """Thread-safe. Each response enters and leaves it.

    Gates of other processes follow this one; each has a function that gets the state after every change.
    """

    def __init__(self, version: int = 0) -> None:
        self.state = GateState(version=version)
        self.left: Callable[[int, int, int], None] | None = None
        """In a gate that follows another one: gets the number of the hold, of the responses that still run, and of the whole ones."""
        self._changed = threading.Condition()
        self._in_order = threading.RLock()
        """Held while followers get a state, so that they get them in order."""
        self._sampling = self._whole = 0
        self._followers: dict[Callable[[GateState], None], tuple[int, int] | None] = {}
        """The numbers of responses and of whole ones in each; None until it has answered to the current hold."""

    @property
    def sampling(self) -> int:
        """The number of responses that run, here and in the followers that have answered."""
        return self._sampling + sum(numbers[0] for numbers in self._followers.values() if numbers)

    @property
    def whole(self) -> int:
        """The number of those that new weights must not interrupt."""
        return self._whole + sum(numbers[1] for numbers in self._followers.values() if numbers)

    async def enter(self, *, whole: bool = False) -> int:
        """Wait until sampling is allowed; returns the version to sample from. Raises `InfrastructureError` if it no longer is.

        ``whole``: the response should not be interrupted by new weights.
        """
        while True:
            with self._changed:
                if self.state.broken is not None:
                    raise InfrastructureError(self.state.broken)
                if not self.state.held:
                    self._sampling += 1
                    self._whole += whole
                    return self.state.version
            # Polling, because callers may be on any event loop; pushes are rare and short.
            await asyncio.sleep(POLL_SECONDS)

    def leave(self, *, whole: bool = False) -> None:
        """A response has ended."""
        with self._changed:
            self._sampling -= 1
            self._whole -= whole
            self._changed.notify_all()
        self._report()

    def hold(self, seconds: float) -> None:
        """Hold new responses back, here and in all followers. Raises `InfrastructureError` if one does not answer in time."""
        self._set(lambda state: replace(state, held=True, holds=state.holds + 1))
        with self._changed:
            if not self._changed.wait_for(lambda: None not in self._followers.values(), seconds):
                raise InfrastructureError(f"a worker of the policy endpoint did not answer within {seconds:g} s")

    def is_empty(self, seconds: float) -> bool:
        """Whether no response runs; waits at most ``seconds`` for it."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.sampling and None not in self._followers.values(), seconds)

    def wait_for_whole(self, seconds: float) -> None:
        """Wait until no whole response runs, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self.whole, seconds)

    def release(self, version: int) -> None:
        """Sample from ``version`` from now on."""
        self._set(lambda state: replace(state, version=version, held=False))

    def fail(self, why: str) -> None:
        """Raise `InfrastructureError` for waiting and further responses."""
        self._set(lambda state: replace(state, broken=why))

    def follow(self, state: GateState) -> None:
        """Take over the ``state`` of the gate that this one follows."""
        self._set(lambda _: state)
        self._report()

    def attach(self, follower: Callable[[GateState], None]) -> None:
        """Add a follower; it gets the state now and after every change."""
        with self._in_order:
            with self._changed:
                self._followers[follower] = None
            follower(self.state)

    def answered(self, follower: Callable[[GateState], None], holds: int, sampling: int, whole: int) -> None:
        """``follower`` has so many responses and whole ones that still run, in the hold with the number ``holds``."""
        with self._changed:
            if follower in self._followers and holds == self.state.holds:
                self._followers[follower] = sampling, whole
                self._changed.notify_all()

    def detach(self, follower: Callable[[GateState], None]) -> None:
        """Remove a follower, whose process has ended."""
        with self._changed:
            self._followers.pop(follower, None)
            self._changed.notify_all()

    def _set(self, change: Callable[[GateState], GateState]) -> None:
        with self._in_order:
            with self._changed:
                before, self.state = self.state, change(self.state)
                if self.state.holds != before.holds:
                    self._followers = dict.fromkeys(self._followers)
                followers = list(self._followers)
            # Not under the lock that `answered` needs: a follower may have to be read before it takes more.
            for follower in followers:
                follower(self.state)

    def _report(self) -> None:
        if self.left is not None and self.state.held:
            self.left(self.state.holds, self._sampling, self._whole)


@runtime_checkable
class SharedBackend(Backend, Protocol):
    """A backend of a server that several processes may use."""

    gate: Gate

    def opener(self) -> Callable[[], SharedBackend]:
        """A function that can be pickled, and opens the backend in another process. Its gate must follow this one's."""
        ...
