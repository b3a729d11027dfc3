"""Signals that end a run in order: SIGINT, SIGTERM and SIGHUP raise `Interrupted` in the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_deferred: list[int] = []
_deferring = 0


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end. ``midway``: inside `uninterrupted`, whose body is incomplete."""

    def __init__(self, number: int = signal.SIGINT, *, midway: bool = False) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.midway = midway


@contextmanager
def interruptible() -> Generator[None]:
    """Raise `Interrupted` in the body for these signals, in the main thread of the process.

    A signal that the process ignores, as under nohup, or that it handles itself is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number in _NUMBERS if (handler := signal.getsignal(number)) in defaults}
    for number in before:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Generator[None]:
    """Complete the body before a signal interrupts; a second signal does so at once."""
    global _deferring
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferring += 1
    try:
        yield
    finally:
        _deferring -= 1
        numbers = _deferred.copy()
        _deferred.clear()
    if numbers:
        raise Interrupted(numbers[0])


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    if _deferring and not _deferred:
        _deferred.append(number)
        return
    raise Interrupted(number, midway=_deferring > 0)
