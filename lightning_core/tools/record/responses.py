"""Reads the body of a response, whole or streamed, by its wire format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from lightning_core.dialects.dialect import EVENT_END, Dialect, event_data
from lightning_core.dialects.exchange import StreamError, UpstreamResponse, stream_error
from lightning_core.otel.unicode import read_json

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)
"""Raised for a body that cannot be read: another server's response may have any form."""

_LONGEST_ERROR = 64 << 10


class ReadResponse(NamedTuple):
    """What the body of a response contains."""

    choices: Sequence[UpstreamResponse] = ()
    """Empty if the response is not complete."""
    id: str | None = None
    failure: StreamError | None = None
    """The error that it reports, though its status may be 200."""


def read_response(dialect: Dialect, content: bytes, *, is_stream: bool) -> ReadResponse:
    """The response in ``content``. ``is_stream``: it has server-sent events. Raises `UNREADABLE`."""
    events: Iterable[Mapping[str, Any]] = _events(content)
    if not is_stream:
        value = read_json(content)
        if not isinstance(value, list):
            if (failure := stream_error(value)) is not None:
                return ReadResponse(id=_id_in(value), failure=failure)
            return ReadResponse(dialect.read_response(value), _id_in(value))
        events = cast("list[Any]", value)  # Gemini's streams without ``alt=sse``
    reader, identity = dialect.stream_reader(), None
    for event in events:
        if (failure := stream_error(event)) is not None:
            return ReadResponse(id=identity, failure=failure)
        identity = identity or _id_in(event)
        reader.read(event)
    return ReadResponse(reader.responses(), identity)


def reported_error(content: bytes) -> StreamError | None:
    """The error in a whole response; None for other responses, and for those that are too long for one."""
    if len(content) > _LONGEST_ERROR or b'"error"' not in content:
        return None
    try:
        value = read_json(content)
    except UNREADABLE:
        return None
    return stream_error(value) if isinstance(value, dict) else None


def find_id(content: bytes, *, is_stream: bool) -> str | None:
    """The id of the response in ``content``, which may be its beginning; None if it has none or cannot be read."""
    try:
        value = _events(content) if is_stream else read_json(content)
        bodies = (value,) if isinstance(value, dict) else value  # Gemini's streams without ``alt=sse`` are lists
        return next((found for body in bodies if (found := _id_in(body))), None)
    except UNREADABLE:
        return None


def _events(content: bytes) -> Iterator[Mapping[str, Any]]:
    for event in EVENT_END.split(content):
        data = event_data(event)
        if data not in (b"", b"[DONE]"):
            value = read_json(data)
            if isinstance(value, dict):
                yield cast("dict[str, Any]", value)


def _id_in(body: Mapping[str, Any]) -> str | None:
    nested = [value for name in ("message", "response") if isinstance(value := body.get(name), Mapping)]
    found = [place.get(name) for place in (body, *nested) for name in ("id", "responseId")]
    return next((value for value in found if isinstance(value, str) and value), None)
