"""Reads the bytes of a call by its wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_core.chat.messages import Message
from lightning_core.dialects import DIALECTS, gemini
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.exchange import ChatRequest, UpstreamResponse
from lightning_core.errors import describe, fold
from lightning_core.otel.unicode import read_json
from lightning_core.tools.record.counts import CONTINUED, OTHER_FORMAT, TOO_LARGE
from lightning_core.tools.record.observed import CUT, INCOMPLETE, ObservedCall
from lightning_core.tools.record.responses import UNREADABLE, ReadResponse, read_response

_DIALECTS: Mapping[str, Dialect] = {dialect.PATH: dialect for dialect in DIALECTS}
_PROVIDERS = {"/messages": "anthropic"}
PREVIOUS_RESPONSE = "previous_response_id"

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
        dialect = gemini
        provider = "gcp.gemini"
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
    read, error = _read_response(call, dialect)
    return ReadCall(provider=provider, request=request, responses=read.choices, response_id=read.id, error=error)


def _http_error(call: ObservedCall) -> str:
    return f"HTTP {call.status}: {fold(_content(call).decode(errors='replace'), 480)}"


def _content(call: ObservedCall) -> bytes:
    data = b"".join(call.parts)
    try:
        return data if call.decode is None or not data else call.decode(data)
    except Exception as error:  # of a client's decoder; a stream that was closed is incomplete
        raise UnreadableCall(f"with a response that cannot be decoded ({type(error).__name__})") from error


def _read_response(call: ObservedCall, dialect: Dialect) -> tuple[ReadResponse, str | None]:
    """The response, and the reason there is none."""
    try:
        read = read_response(dialect, _content(call), is_stream="event-stream" in call.content_type)
    except UnreadableCall as error:
        return ReadResponse(), call.error or str(error)
    except UNREADABLE as error:
        return ReadResponse(), call.error or f"the response cannot be read: {describe(error)}"
    if read.failure is not None:
        where = "stream" if "event-stream" in call.content_type else "response"
        return read, f"the provider reported an error in the {where}: {fold(read.failure.message, 240)}"
    return read, None if read.choices else call.error or (CUT if "event-stream" in call.content_type else INCOMPLETE)
