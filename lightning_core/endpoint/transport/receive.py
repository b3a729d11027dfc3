"""Reads requests within limits of time and size, and parses their JSON.

uvicorn limits the size of headers, for one of its parsers, but not how long they take, and not bodies. Beyond a limit the request gets a
4xx status, or its connection is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lightning_core.chat.json_text import show_json
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.errors import COUNTED, PolicyRequestError, Repeats
from lightning_core.propagation.compression import SUPPORTED, decompress, encodings

logger = logging.getLogger(__name__)

_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_BEFORE_EXPONENT = re.compile(rb"(?:^|[\s:,\[])-?\d[\d.]*$")
_MOST_DIGITS = 200
"""More may overflow a float, with an exponent of two digits."""
_MOST_CANDIDATES = 100
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A JSON string; one without an end is the rest of the body."""
_VALUES_OF_A_LIST = 8
"""An empty list takes about this many times as long to parse as a number."""
_UPGRADE = re.compile(rb"^upgrade(?=[ \t]*:)", re.IGNORECASE | re.MULTILINE)


async def read_body(request: Request, *, most_bytes: int, seconds: float) -> bytes:
    """The body of ``request``.

    Raises `PolicyRequestError` if it is larger than ``most_bytes`` (413; it is then not read) or takes longer than ``seconds`` (408),
    and starlette's ``ClientDisconnect`` if the client disconnects.
    """
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdecimal() else 0
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(seconds):
            if size <= most_bytes:
                size = 0
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > most_bytes:
                        break
    except TimeoutError:
        raise PolicyRequestError(f"the request body did not arrive within {seconds:g} s", status=408) from None
    if size > most_bytes:
        raise PolicyRequestError(f"the request body has more than {most_bytes} bytes, which is the limit", status=413)
    return b"".join(chunks)


def plain_body(data: bytes, encoding: str, *, most_bytes: int) -> bytes:
    """A request body without its ``content-encoding``.

    Raises `PolicyRequestError` for an unsupported encoding (415), data that does not have its encoding (400), and more than
    ``most_bytes`` bytes (413).
    """
    try:
        plain = decompress(data, encodings(encoding), most_bytes=most_bytes)
    except LookupError:
        raise PolicyRequestError(
            f"the request body has the content-encoding {show_json(encoding)}, which is not supported: send it uncompressed, or "
            f"compressed with {' or '.join(SUPPORTED)}",
            status=415,
        ) from None
    except ValueError as error:
        raise PolicyRequestError(
            f"the request body has the content-encoding {show_json(encoding)}, but {error}"
        ) from None
    if len(plain) > most_bytes:
        raise PolicyRequestError(
            f"the request body has more than {most_bytes} bytes when decompressed, which is the limit", status=413
        )
    return plain


def check_strings(data: bytes, most: int) -> None:
    """Raise `PolicyRequestError` if the JSON ``data`` has more than ``most`` strings, or twice as many that end with a backslash."""
    quotes = data.count(b'"')
    if quotes // 2 <= most:  # the usual case, without a second search
        return
    strings = (quotes - data.count(b'\\"')) // 2
    if strings > most:
        raise PolicyRequestError(
            f"the request body has {strings} JSON strings, with keys; expected at most {most}. Send fewer messages, tools or stop strings"
        )


def check_values(data: bytes, most: int) -> None:
    """Raise `PolicyRequestError` if the JSON ``data`` has more than ``most`` values, of which a list or an object is eight."""

    def values(start: int, end: int) -> int:
        lists, objects = data.count(b"[", start, end), data.count(b"{", start, end)
        return data.count(b",", start, end) + _VALUES_OF_A_LIST * (lists + objects)

    if values(0, len(data)) <= most:  # the usual case; most of these characters are in strings
        return
    found, at = 0, 0
    for string in _STRING.finditer(data):  # one by one: other threads run meanwhile
        found += values(at, string.start())
        at = string.end()
    found += values(at, len(data))
    if found > most:
        raise PolicyRequestError(
            f"the request body has {found} JSON values, of which a list or an object is {_VALUES_OF_A_LIST}; expected at most {most}. "
            "Send shorter lists"
        )


def read_json(data: bytes) -> Any:
    """Parse UTF-8 JSON, at most 200 levels deep, without NaN, infinities and lone surrogates.

    Raises `PolicyRequestError` for anything else.
    """
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="keys")  # a cache of all takes three times as long
        if _may_be_infinite(data):
            json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise PolicyRequestError(
            f"the request body is not JSON: {error}; expected UTF-8, at most 200 levels deep, without NaN, infinities and lone surrogates"
        ) from None
    return value


def _may_be_infinite(data: bytes) -> bool:
    """Whether the JSON ``data`` may have a number that overflows a float. One regular expression takes several times as long."""
    zeros = data.translate(_ZEROS)
    if b"0" * _MOST_DIGITS in zeros:
        return True
    candidates = 0
    for exponent in (b"0e000", b"0e+000"):
        at = zeros.find(exponent)
        while at >= 0:
            candidates += 1
            # Most are in strings, such as digests.
            if candidates > _MOST_CANDIDATES or _BEFORE_EXPONENT.search(
                data[max(0, at - 2 * _MOST_DIGITS - 2) : at + 1]
            ):
                return True
            at = zeros.find(exponent, at + 1)
    return False


def connection_class(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's connection class, with limits for the request line and headers.

    Private: ``cycle``, the current request, and ``on_response_complete``, present in uvicorn 0.30 to 0.54, in both parsers' classes
    (https://github.com/encode/uvicorn/blob/0.30.0/uvicorn/protocols/http/h11_impl.py#L57).
    """
    parser: Any = AutoHTTPProtocol
    late = Repeats()

    class Connection(parser):  # pyright: ignore[reportUntypedBaseClass]
        _deadline: asyncio.TimerHandle | None = None
        _header_bytes = 0
        _end_of_last = b""
        """Of the last data with headers: the line that ends them may come in parts."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._expect()

        def data_received(self, data: bytes) -> None:
            if self._expects_headers() and self._count_headers(data) > limits.header_bytes:
                self.transport.close()
                return
            super().data_received(self._without_upgrade(data))
            if self._answering():
                self._forget()
                return
            self._expect()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.more_body:  # the rest of a refused body
                self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _without_upgrade(self, data: bytes) -> bytes:
            """``data`` with another name for the Upgrade header, which a server may ignore: httptools then skips the body.

            JDK's client sends it. The name is as long, so that no length changes.
            """
            if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
                return data
            head, end, body = data.partition(b"\r\n\r\n")
            return _UPGRADE.sub(b"ignored", head) + end + body if _UPGRADE.search(head) else data

        def _expects_headers(self) -> bool:
            return self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)

        def _count_headers(self, data: bytes) -> int:
            """The bytes of the request line and headers so far, with those that ``data`` begins with."""
            before, known = self._end_of_last, len(self._end_of_last)
            head, end, _ = (before + data).partition(b"\r\n\r\n")
            self._header_bytes += len(head) - known
            self._end_of_last = b"" if end else head[-3:]
            return self._header_bytes

        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _expect(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(limits.header_seconds, self._give_up)

        def _forget(self) -> None:
            self._header_bytes, self._end_of_last = 0, b""
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            if not self._answering():
                if self._header_bytes and (times := late.count("headers")) is not None:
                    logger.warning(
                        "a connection was closed%s: the headers of its request did not arrive within %g s. The machine or the agent's "
                        "event loop may be overloaded: lower rollouts.concurrency",
                        times,
                        limits.header_seconds,
                        extra=COUNTED,
                    )
                self.transport.close()

    return Connection
