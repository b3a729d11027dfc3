"""Reads the id, the model and the token counts of a response, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lightning_core.dialects.dialect import Dialect

_MOST_BYTES = 4 << 20
"""Of a response whose token counts are read."""


class ReadResponse(NamedTuple):
    """What a response says about itself; None for what it does not."""

    model: str | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


def response_id(data: Mapping[str, Any]) -> str | None:
    """The id in the JSON of a response or of an event of a stream."""
    inner = (data, data.get("response"), data.get("message"))
    for part in inner:
        if isinstance(part, Mapping):
            for name in ("id", "responseId"):
                if isinstance(value := part.get(name), str) and value:  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
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
    """The usage in the response ``data``; None if it is not complete, cannot be read or is larger than 4 MiB."""
    if len(data) > _MOST_BYTES:
        return None
    try:
        if streamed:
            reader = dialect.stream_reader()
            for event in events_of(data):
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
    return ReadResponse(first.model, first.input_tokens, first.cached_tokens, first.output_tokens)
