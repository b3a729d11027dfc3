"""The interface of a wire format.

Each module of this package that implements it is a `Dialect`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lightning_core.chat.messages import Message
from lightning_core.dialects.exchange import ChatRequest, Choice, ResponseContext, UpstreamResponse
from lightning_core.dialects.fields import Fields

EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
"""The end of a server-sent event."""


class StreamWriter(Protocol):
    """Writes one streamed response.

    Each method returns the server-sent events to send now, or nothing.
    """

    def begin(self, index: int) -> bytes:
        """The events before choice ``index`` is sampled."""
        ...

    def think(self, index: int, reasoning: str) -> bytes:
        """The events for the whole reasoning of choice ``index``.

        Called at most once, before any text.
        """
        ...

    def more(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
        """The events for newly sampled ``token_ids`` and for ``text``, which may be empty."""
        ...

    def finish(self, index: int, choice: Choice, rest: str) -> bytes:
        """The events that complete choice ``index``; ``rest`` is its text that was not sent yet."""
        ...

    def end(self, choices: Sequence[Choice]) -> bytes:
        """The events after the last choice."""
        ...


class StreamReader(Protocol):
    """Reads a streamed response of an upstream server."""

    over: bool
    """Whether the last event was read. Always False for formats that end with ``[DONE]``."""

    def read(self, event: Mapping[str, Any]) -> None:
        """Add the JSON of one event."""
        ...

    def responses(self) -> list[UpstreamResponse]:
        """All responses of the stream; empty if it is not complete."""
        ...


class Dialect(Protocol):
    """One wire format."""

    @property
    def PATH(self) -> str:
        """The path of requests, relative to the base URL."""
        ...

    @property
    def KEY_HEADER(self) -> str:
        """The header with the API key; ``authorization`` holds it as a bearer token."""
        ...

    @property
    def FORWARDED_HEADERS(self) -> Sequence[str]:
        """Headers that are part of a request and are forwarded with it."""
        ...

    @property
    def FIELDS(self) -> Fields:
        """The fields of a request."""
        ...

    @property
    def NESTED(self) -> Mapping[str, Fields]:
        """The fields of the objects inside a request, by the place and the type of the object."""
        ...

    def parse_request(self, body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read a request that is answered here.

        ``conversations``: the messages up to each response of the rollout, by its id.

        Raises `PolicyRequestError` with the name of the field that is not supported.
        """
        ...

    def read_request(self, body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Read what is recorded of a request that is forwarded. Fields are not checked.

        Raises `PolicyRequestError` if the request cannot be read at all.
        """
        ...

    def write_response(self, context: ResponseContext, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of a response without streaming."""
        ...

    def stream_writer(self, context: ResponseContext) -> StreamWriter:
        """A writer for one streamed response."""
        ...

    def read_response(self, body: Mapping[str, Any]) -> list[UpstreamResponse]:
        """The responses in an upstream server's ``body``; empty if it has none."""
        ...

    def stream_reader(self) -> StreamReader:
        """A reader for one streamed response of an upstream server."""
        ...

    def error_body(self, message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
        """An error as clients of this format expect it. ``param``: the path of the field."""
        ...

    def error_event(self, message: str) -> bytes:
        """The event that ends a stream after an error."""
        ...


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{name}data: {text}\n\n".encode()


def event_data(event: bytes) -> bytes:
    """The data of one server-sent event; empty for comments."""
    return b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
