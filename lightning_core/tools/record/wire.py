"""Reads the bytes of a call by its wire format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from lightning_core.chat.messages import Message
from lightning_core.dialects import ALL_DIALECTS, DIALECTS, gemini
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.exchange import ChatRequest, UpstreamResponse, stream_error
from lightning_core.errors import describe, fold
from lightning_core.tools.record.counts import CONTINUED, OTHER_FORMAT, TOO_LARGE
from lightning_core.tools.record.observed import CUT, ObservedCall
from lightning_core.tools.record.unicode import read_json

_DIALECTS: Mapping[str, Dialect] = {dialect.PATH: dialect for dialect in DIALECTS}
_PROVIDERS = {"/messages": "anthropic"}
PREVIOUS_RESPONSE = "previous_response_id"
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")

RESPONSE_ID_PREFIX = "resp_"


class UnreadableCall(Exception):
    """A call that cannot be recorded, for ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCall:
    """A call as it was read."""

    provider: str
    """The provider whose wire format it has, as OpenTelemetry names it."""
    request: ChatRequest
    responses: Sequence[UpstreamResponse]
    """Empty if the call failed."""
    response_id: str | None
    error: str | None


def read_call(call: ObservedCall, conversations: Mapping[str, Sequence[Message]]) -> ReadCall:
    """The request and the responses of ``call``.

    ``conversations``: the messages up to each response, by its id. Raises `UnreadableCall` with the reason it is left out, and what the
    wire format raises for a request that it cannot read.
    """
    if call.too_large:
        raise UnreadableCall(TOO_LARGE)
    body, provider = read_json(call.body), _PROVIDERS.get(call.route, "openai")
    dialect: Dialect | None = _DIALECTS.get(call.route)
    if call.route.endswith(tuple(f":{method}" for method in gemini.METHODS)):
        dialect, provider = ALL_DIALECTS[-1], "gcp.gemini"
        body = gemini.with_url(body, call.path, stream=call.route.endswith(gemini.STREAM))
    if dialect is None:
        raise UnreadableCall(OTHER_FORMAT)
    previous = body.get(PREVIOUS_RESPONSE)
    if isinstance(previous, str) and previous.removeprefix(RESPONSE_ID_PREFIX) not in conversations:
        raise UnreadableCall(CONTINUED)
    request = dialect.read_request(body, conversations=conversations)
    if call.status is None or call.status >= 400:
        text = "" if call.status is None else _http_error(call)
        return ReadCall(
            provider=provider,
            request=request,
            responses=(),
            response_id=None,
            error=call.error or text or "no response",
        )
    responses, identity, error = _read_response(call, dialect)
    if not responses:
        error = error or call.error or CUT
    return ReadCall(
        provider=provider,
        request=request,
        responses=responses,
        response_id=identity,
        error=None if responses else error,
    )


def _http_error(call: ObservedCall) -> str:
    return f"HTTP {call.status}: {fold(_content(call).decode(errors='replace'), 480)}"


def _content(call: ObservedCall) -> bytes:
    data = b"".join(call.parts)
    try:
        return data if call.decode is None or not data else call.decode(data)
    except Exception as error:  # of a client's decoder; a stream that was closed is incomplete
        raise UnreadableCall(f"with a response that cannot be decoded ({type(error).__name__})") from error


def _read_response(call: ObservedCall, dialect: Dialect) -> tuple[Sequence[UpstreamResponse], str | None, str | None]:
    """The responses, the id of the response, and the reason there are none."""
    try:
        content = _content(call)
        if "event-stream" not in call.content_type:
            value = read_json(content)
            if isinstance(value, list):  # Gemini's streams without ``alt=sse``
                return _read_events(dialect, iter(cast("list[Any]", value)))
            return dialect.read_response(value), _response_id(value), None
        return _read_events(dialect, _events(content))
    except UnreadableCall as error:
        return (), None, call.error or str(error)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return (), None, call.error or f"the response cannot be read: {describe(error)}"


def _read_events(
    dialect: Dialect, events: Iterator[Mapping[str, Any]]
) -> tuple[Sequence[UpstreamResponse], str | None, str | None]:
    reader, identity = dialect.stream_reader(), None
    for event in events:
        if (failure := stream_error(event)) is not None:
            return (), identity, f"the provider reported an error in the stream: {fold(failure.message, 240)}"
        identity = identity or _response_id(event)
        reader.read(event)
    return reader.responses(), identity, None


def _events(content: bytes) -> Iterator[Mapping[str, Any]]:
    for event in _EVENT_END.split(content):
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if data not in (b"", b"[DONE]"):
            value = read_json(data)
            if isinstance(value, dict):
                yield cast("dict[str, Any]", value)


def _response_id(body: Mapping[str, Any]) -> str | None:
    nested = [value for name in ("message", "response") if isinstance(value := body.get(name), Mapping)]
    found = [place.get(name) for place in (body, *nested) for name in ("id", "responseId")]
    return next((value for value in found if isinstance(value, str)), None)
