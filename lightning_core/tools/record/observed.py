"""One request to a provider and its response, as bytes, while the program's client sends and reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_core.errors import describe
from lightning_core.tools.record.units import CallOrigin

MOST_BYTES = 32 << 20
"""The largest response that is recorded, in bytes."""

CLOSED = "the client closed the stream before its end"
CUT = "the stream ended before the response was complete"
INCOMPLETE = "the response has no message"
OPEN = "it was in progress when the recording ended"

_sending: ContextVar[bool] = ContextVar("lightning_record_sending", default=False)


class Receiver(Protocol):
    """Receives calls that have ended."""

    def receive(self, call: ObservedCall) -> None:
        """Take over ``call``. Must return at once, and not raise."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class ObservedCall:
    """A model call. Its methods never raise, and copy no bytes."""

    receiver: Receiver
    route: str
    """The path of the endpoint for such a call; see `find_route`."""
    path: str
    host: str
    body: bytes
    origin: CallOrigin
    sequence: int
    is_kept: bool = True
    """Whether the call is recorded; otherwise nothing of its response is kept."""
    start_ns: int = field(default_factory=time.time_ns)
    end_ns: int = 0
    status: int | None = None
    content_type: str = ""
    decode: Callable[[bytes], bytes] | None = None
    """Removes the content encoding of the response; None: it has none."""
    error: str | None = None
    too_large: bool = False
    parts: list[bytes] = field(default_factory=list[bytes])
    size: int = 0
    _ended: bool = False

    def respond(self, status: int, content_type: str, decode: Callable[[bytes], bytes] | None = None) -> None:
        """Note the head of the response."""
        self.status, self.content_type, self.decode = status, content_type, decode

    def add(self, part: Any) -> None:
        """Note a part of the response's body, which the client has read."""
        if not isinstance(part, bytes) or not self.is_kept or self.too_large or self._ended:
            return
        self.size += len(part)
        self.parts.append(part)
        if self.size > MOST_BYTES:
            self.too_large = True
            self.parts.clear()

    def fail(self, error: BaseException) -> None:
        """Note that the client raised ``error`` instead of a response, or while it read the response."""
        self.leave(CLOSED if isinstance(error, GeneratorExit) else describe(error))

    def leave(self, reason: str = CLOSED) -> None:
        """Note that the response is not read any further, for ``reason``."""
        if not self._ended:
            self.error = self.error or reason
            self.end()

    def end(self) -> None:
        """Note the end of the response's body: hand the call over, unless that was done."""
        if not self._ended:
            self._ended = True
            self.end_ns = time.time_ns()
            self.receiver.receive(self)

    def drop(self) -> bool:
        """End the call without handing it over; return False if it had ended."""
        ended, self._ended = self._ended, True
        self.parts.clear()
        return not ended


def is_sending() -> bool:
    """Whether a client library that this one serves observes the request already."""
    return _sending.get()


@contextmanager
def sending(call: ObservedCall) -> Generator[None]:
    """Send the request of ``call`` in the body. Libraries below the client's do not observe it again."""
    token = _sending.set(True)
    try:
        yield
    except BaseException as error:
        call.fail(error)
        raise
    finally:
        _sending.reset(token)
