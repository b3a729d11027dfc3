"""Runs work of a size that clients choose on threads of its own, so that no request waits for another's."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

SMALL = 16 << 10
"""Work on up to this many bytes is done at once, on the event loop: a few milliseconds, about as long as another thread takes to start."""
UNKNOWN = SMALL + 1
"""The size of work whose time has little to do with the size of the request, such as decompressing it."""
LONG = 256 << 10
"""Work on more bytes has its own threads, so that shorter work does not wait for it."""
BYTES_OF_TOKEN = 4
"""To record or write a token takes about as long as to read this many bytes."""
_THREADS = 2
"""Of each length. More would wait for each other: only tokenizing and hashing let other threads run."""
_SWITCH_SECONDS = 0.0005
"""The longest time for which a thread with work keeps the interpreter from the event loop; Python's default is ten times as long."""


class LargeWork:
    """Runs work on threads. In the order of arrival, but of one rollout at most ``at_once`` pieces of each length at a time."""

    def __init__(self, *, at_once: int = 1) -> None:
        self._lanes = (_Lane("shorter", at_once), _Lane("longer", at_once))
        self._compilers = _Lane("compiling", at_once)

    async def run(self, rollout: str, size: int, work: Callable[[], T], *, compiles: bool = False) -> T:
        """The result of ``work`` on ``size`` bytes for ``rollout``, here if that is small.

        ``compiles``: it compiles a schema, which may take any time, and has its own threads. If this is cancelled, work that has
        begun is completed first: it may hold open spans.
        """
        if compiles:
            return await self._compilers.run(rollout, work)
        if size <= SMALL:
            return work()
        return await self._lanes[size > LONG].run(rollout, work)

    def close(self) -> None:
        """Start no more work."""
        for lane in (*self._lanes, self._compilers):
            lane.close()


@dataclass(slots=True)
class _Turns:
    """The turns of one rollout in a lane."""

    free: asyncio.Semaphore
    waiting: int = 0


@dataclass(slots=True)
class _Lane:
    name: str
    at_once: int
    _threads: ThreadPoolExecutor | None = None
    _turns: dict[str, _Turns] = field(default_factory=dict[str, _Turns])

    async def run(self, rollout: str, work: Callable[[], T]) -> T:
        turns = self._turns.setdefault(rollout, _Turns(asyncio.Semaphore(self.at_once)))
        turns.waiting += 1
        try:
            async with turns.free:
                return await self._complete(work)
        finally:
            turns.waiting -= 1
            if not turns.waiting:
                del self._turns[rollout]

    async def _complete(self, work: Callable[[], T]) -> T:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"lightning-{self.name}-work")
        context = contextvars.copy_context()
        job: Future[T] = self._threads.submit(lambda: context.run(lambda: _interruptible(work)))
        done = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not job.cancel():
                await asyncio.wait({done})
                if not done.cancelled():
                    done.exception()  # nobody else asks for it
            raise
        finally:
            del job, done  # an error refers to this frame: with them it would be freed late, with all of the body

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _interruptible(work: Callable[[], T]) -> T:
    with _short_switches():
        return work()


_lock = threading.Lock()
_running = 0
_usual = 0.0


@contextmanager
def _short_switches() -> Generator[None]:
    """Let other threads run more often while there is work on threads."""
    global _running, _usual
    with _lock:
        if not _running:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual, _SWITCH_SECONDS))
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                sys.setswitchinterval(_usual)
