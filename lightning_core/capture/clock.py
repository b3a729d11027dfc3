"""The clock of an agent's process, which a fork sets to the start of the rollout that it repeats.

It ticks. Spans keep the real time. Timeouts, locks and event loops use the monotonic clock, which stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from lightning_core.errors import MissingExtra

_real_time_ns: Callable[[], int] = time.time_ns
_behind_ns = 0
"""How far the agent's clock is behind."""


def now_ns() -> int:
    """The real time, in nanoseconds since 1970; the agent may have another."""
    return _real_time_ns()


def to_real_ns(agent_ns: int) -> int:
    """The real time at which the agent's clock shows ``agent_ns``."""
    return agent_ns + _behind_ns


def require_clock() -> Any:
    """The library that sets the clock. Raises `MissingExtra` if it is not installed."""
    try:
        return import_module("time_machine")
    except ModuleNotFoundError:
        raise MissingExtra("time-machine", "clock", "rollouts.forks.clock: recorded") from None


@contextmanager
def clock_from(start_ns: int | None) -> Generator[None]:
    """Start this process's clock at ``start_ns`` for the body; None: leave it. For one rollout at a time.

    Not changed: the clocks of child programs, of the file system, and of libraries that read the time without Python.
    """
    global _real_time_ns, _behind_ns
    if start_ns is None:
        yield
        return
    machine = require_clock()
    epoch_ns = time.time_ns() - time.monotonic_ns()

    def real_time_ns() -> int:
        return epoch_ns + time.monotonic_ns()

    # Set before the clock is and reset after it, since other threads read the time too.
    _real_time_ns = real_time_ns
    try:
        with machine.travel(start_ns / 1e9):
            _behind_ns = now_ns() - time.time_ns()
            yield
    finally:
        _real_time_ns, _behind_ns = time.time_ns, 0
