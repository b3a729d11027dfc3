"""Signals that end a run in order: SIGINT, SIGTERM and SIGHUP raise `Interrupted` in the main thread. SIGUSR1 asks for a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_SAVE = getattr(signal, "SIGUSR1", None)
_AGAIN_SECONDS = 0.01
"""Enough for most callbacks to end."""
_deferred: list[int] = []
_deferring = 0
_asked: list[int] = []
"""The signal that asked for the end after the step, if any."""
_timers: list[threading.Timer] = []
"""What sends signals again."""
_to_save = threading.Event()


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end. ``midway``: inside `uninterrupted`, whose body is incomplete."""

    def __init__(self, number: int = signal.SIGINT, *, midway: bool = False) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.midway = midway


@contextmanager
def interruptible(grace_seconds: float | None = None, *, on_save: Callable[[], None] | None = None) -> Generator[None]:
    """Raise `Interrupted` in the body for these signals, in the main thread of the process.

    Python discards what is raised in a ``__del__`` method or in a callback of a weak reference, so a signal that arrives there is sent
    again.

    ``grace_seconds``: the body calls `end_if_asked`, which raises for SIGTERM; after that time it is raised anywhere. The body
    also calls `save_asked`. None: it calls neither. ``on_save``: called for SIGUSR1 instead. A signal that the process ignores, as
    under nohup, or that it handles itself is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if _asked or not grace_seconds:
            _interrupt(number, frame)
            return
        _asked.append(number)
        _send_after(grace_seconds, number)

    handlers: dict[int, Callable[[int, FrameType | None], None]] = dict.fromkeys(_NUMBERS, _interrupt)
    handlers[signal.SIGTERM] = ask
    save = _to_save.set if on_save is None and grace_seconds is not None else on_save
    if _SAVE is not None and save is not None:
        handlers[_SAVE] = lambda *_: save()
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number in handlers if (handler := signal.getsignal(number)) in defaults}
    for number in before:
        signal.signal(number, handlers[number])
    report = sys.unraisablehook

    def send_again(discarded: sys.UnraisableHookArgs) -> None:
        if isinstance(discarded.exc_value, Interrupted):
            _send_after(_AGAIN_SECONDS, discarded.exc_value.number)
        else:
            report(discarded)

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        if sys.unraisablehook is send_again:  # else the body has set another one
            sys.unraisablehook = report
        _stop_timers()
        _asked.clear()
        _to_save.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_if_asked() -> None:
    """Raise `Interrupted` if a signal asked for the end after the step. The rest of the grace period does not interrupt what follows."""
    if _asked:
        _stop_timers()
        raise Interrupted(_asked[0])


def _send_after(seconds: float, number: int) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
    _timers.append(timer)


def _stop_timers() -> None:
    for timer in _timers:
        timer.cancel()
    _timers.clear()


def save_asked() -> bool:
    """Whether a signal asked for a checkpoint since the last call."""
    asked = _to_save.is_set()
    _to_save.clear()
    return asked


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
