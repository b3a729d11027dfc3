"""One request to one arm, from the answer's first byte to its record."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import httpx

from lightning_core.dialects.dialect import EVENT_END
from lightning_core.dialects.exchange import UpstreamResponse
from lightning_core.errors import UpstreamError, describe, fold
from lightning_core.tools.record.observed import MOST_BYTES, ObservedCall
from lightning_core.tools.record.responses import UNREADABLE, ReadResponse, find_id, read_response, reported_error
from lightning_core.tools.switch.arm import Arm, dialect_of_path
from lightning_core.tools.switch.store import DISCONNECTED, ArmCall, KnownCall

_MOST_SEARCHED = 64 << 10
"""Bytes of a stream in which the response's id is searched."""
_LARGEST = 1 << 53


@dataclass(slots=True, kw_only=True)
class SentRequest:
    """A request to the switch, as it is sent to arms."""

    agent: str
    conversation: str
    path: str
    query: str
    headers: Sequence[tuple[str, str]]
    body: Mapping[str, Any]
    data: bytes = field(repr=False)


class Outlet(Protocol):
    """Sends requests, and receives their records."""

    async def send(self, sent: SentRequest, arm: Arm) -> httpx.Response:
        """The response of ``arm``, whose body is not read yet."""
        ...

    def observe(self, sent: SentRequest, arm: Arm) -> ObservedCall | None:
        """The record of a call with its messages; None if none is kept."""
        ...

    def answered(self, read: Callable[[], ArmCall], size: int) -> None:
        """Record the call that ``read`` returns, on another thread. It keeps ``size`` bytes until then."""
        ...

    def busy(self, arm: Arm, change: int) -> None:
        """Count a request of ``arm`` in progress, or one less."""
        ...

    def remember(self, response: str, call: KnownCall) -> None:
        """Accept feedback about ``response``."""
        ...


class ArmExchange:
    """One request to one arm. It is recorded once: by `end`, `fail`, or the end of `parts`."""

    def __init__(self, outlet: Outlet, sent: SentRequest, arm: Arm, *, shadow: bool = False) -> None:
        self.id = f"call-{secrets.token_hex(8)}"
        self.is_stream = False
        self._outlet = outlet
        self._sent = sent
        self._arm = arm
        self._shadow = shadow
        self._clock, self._began = time.monotonic(), time.time()
        self._first_byte: float | None = None
        self._response: httpx.Response | None = None
        self._named: str | None = None
        self._recorded = False
        # A shadow's responses reach nobody, so there is nothing to learn from them.
        self._observed = None if shadow else outlet.observe(sent, arm)
        self._know(None)
        outlet.busy(arm, 1)

    async def open(self) -> httpx.Response:
        """Send the request; return its response once that has begun."""
        self._response = await self._outlet.send(self._sent, self._arm)
        self._first_byte = time.monotonic() - self._clock
        content_type = self._response.headers.get("content-type", "")
        self.is_stream = content_type.startswith("text/event-stream")
        if self._observed is not None:
            self._observed.respond(self._response.status_code, content_type)
        return self._response

    async def parts(self) -> AsyncGenerator[bytes]:
        """The bytes of the response as they arrive."""
        assert self._response is not None
        data, searched, error = bytearray(), 0, DISCONNECTED
        try:
            async for part in self._response.aiter_bytes():
                arrived = len(data)
                if arrived <= MOST_BYTES:  # of a longer one only the id is read
                    data += part
                if self._named is None and searched < _MOST_SEARCHED:
                    # At most three bytes of an event's end are in the part before.
                    ends = [end.end() for end in EVENT_END.finditer(data, max(searched, arrived - 3))]
                    if ends:
                        self._name(find_id(bytes(data[searched : ends[-1]]), is_stream=True))
                        searched = ends[-1]
                yield part
            error = None
        except httpx.HTTPError as failure:
            error = f"its stream ended early: {describe(failure)}"
            raise
        finally:
            await self._response.aclose()
            self._record(bytes(data), error)

    def reports_failure(self, data: bytes) -> bool:
        """Whether the whole response ``data`` has an error that the request did not cause, though its status may be 200."""
        found = None if self.is_stream else reported_error(data)
        return found is not None and not found.is_request_error

    def end(self, data: bytes) -> None:
        """Record the complete response ``data``, which is no stream to the client."""
        self._name(find_id(data, is_stream=self.is_stream))
        self._record(data, None)

    def fail(self, error: BaseException) -> None:
        """Record that there is no response."""
        if isinstance(error, asyncio.CancelledError):
            text = "it had no response when the switch ended" if self._shadow else DISCONNECTED
        else:
            text = describe(error)
        self._record(b"", text)

    def _name(self, response: str | None) -> None:
        self._named = response = _text(response)
        if response is not None and not self._shadow:
            self._know(response)

    def _know(self, response: str | None) -> None:
        """Accept feedback by the id of the call and that of its ``response``."""
        sent = self._sent
        known = KnownCall(self.id, sent.agent, self._arm.name, sent.conversation, response)
        for name in filter(None, (self.id, response)):
            self._outlet.remember(name, known)

    def _record(self, data: bytes, error: str | None) -> None:
        if self._recorded:
            return
        self._recorded = True
        self._outlet.busy(self._arm, -1)
        if dialect_of_path(self._sent.path) is None:  # such as one that counts tokens
            return
        read = partial(self._as_call, data, error, time.monotonic() - self._clock)
        self._outlet.answered(read, len(data) + len(self._sent.data))

    def _as_call(self, data: bytes, error: str | None, seconds: float) -> ArmCall:
        sent, status = self._sent, 0 if self._response is None else self._response.status_code
        if error is None and status >= 400:
            error = f"status {status}: {data[:200].decode(errors='replace')}"
        dialect, read = dialect_of_path(sent.path), ReadResponse()
        if dialect is not None and error in (None, DISCONNECTED) and len(data) <= MOST_BYTES:
            with contextlib.suppress(*UNREADABLE):
                read = read_response(dialect, data, is_stream=self.is_stream)
        if read.failure is not None:
            error = f"an error in the {'stream' if self.is_stream else 'response'}: {fold(read.failure.message, 200)}"
        elif read.choices:  # Clients disconnect after the last event, before the end of the response.
            error = None
        if self._observed is not None:
            self._observed.add(data)
            if error is None or status >= 400:
                self._observed.end()
            else:
                self._observed.fail(UpstreamError(error))
        # Each choice of a response reports the usage of all.
        first = read.choices[0] if read.choices else UpstreamResponse(message={})
        return ArmCall(
            id=self.id,
            response=self._named or _text(read.id),
            agent=sent.agent,
            conversation=sent.conversation,
            arm=self._arm.name,
            shadow=self._shadow,
            began=self._began,
            seconds=seconds,
            first_byte=self._first_byte,
            status=status,
            error=error,
            input_tokens=_count(first.input_tokens),
            cached_tokens=_count(first.cached_tokens),
            output_tokens=_count(first.output_tokens),
            model=_text(first.model),
        )


def _text(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST else None
