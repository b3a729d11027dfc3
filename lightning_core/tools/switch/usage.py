"""Reads the id, the model and the token counts of a response, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.exchange import stream_error
from lightning_core.errors import fold

MOST_BYTES = 32 << 20
"""Of a response that is read and recorded. A stream has some 200 bytes for each token."""
_LARGEST = 1 << 53


class ReadResponse(NamedTuple):
    """What a response says about itself; None for what it does not."""

    model: str | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    """The error that its stream reports."""


def response_id(data: Mapping[str, Any]) -> str | None:
    """The id in the JSON of a response or of an event of a stream."""
    inner = (data, data.get("response"), data.get("message"))
    for part in inner:
        if isinstance(part, Mapping):
            for name in ("id", "responseId"):
                if (value := text_or_none(part.get(name))) is not None:  # pyright: ignore[reportUnknownMemberType]
                    return value
    return None


def events_of(data: bytes) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of the complete server-sent events in ``data``."""
    for line in data.splitlines():
        if line.startswith(b"data:"):
            try:
                value = json.loads(line[5:])
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def read_usage(dialect: Dialect, data: bytes, *, streamed: bool) -> ReadResponse | None:
    """The usage in the response ``data``; None if it is not complete, cannot be read or is larger than 32 MiB."""
    if len(data) > MOST_BYTES:
        return None
    try:
        if streamed:
            reader = dialect.stream_reader()
            for event in events_of(data):
                if (failure := stream_error(event)) is not None:
                    return ReadResponse(error=f"an error in the stream: {fold(failure.message, 200)}")
                reader.read(event)
            found = reader.responses()
        else:
            found = dialect.read_response(json.loads(data))
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        LookupError,
    ):  # another server's response may have any form
        return None
    if not found:
        return None
    # Each choice of a response reports the usage of all.
    first = found[0]
    return ReadResponse(
        model=text_or_none(first.model),
        input_tokens=_count(first.input_tokens),
        cached_tokens=_count(first.cached_tokens),
        output_tokens=_count(first.output_tokens),
    )


def text_or_none(value: Any) -> str | None:
    """``value`` if it is a text, with at most 200 characters and without lone surrogates."""
    return value[:200].encode("utf-8", "replace").decode() if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST else None
