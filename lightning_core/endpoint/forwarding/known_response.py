"""Responses whose messages are known, but not their tokens: those of a recording."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from starlette.responses import JSONResponse, Response

from lightning_core.chat.messages import Message
from lightning_core.dialects.dialect import Dialect, StreamWriter
from lightning_core.dialects.exchange import ChatRequest, Choice, ResponseContext, ResponseCounts
from lightning_core.endpoint.transport.event_stream import EventStream


def known_choice(message: Message | None, finish_reason: str | None) -> Choice:
    """A choice with ``message`` and no tokens."""
    return Choice(message=dict(message or {}), token_ids=[], logprobs=[], finish_reason=finish_reason or "stop")


def write_known(
    dialect: Dialect,
    request: ChatRequest,
    choices: Sequence[Choice],
    *,
    call: str,
    model: str,
    counts: ResponseCounts | None = None,
    reports_usage: bool = True,
    before: AsyncGenerator[bytes] | None = None,
) -> Response:
    """The response to ``request``, streamed if it says so; ``before``: the first events of the stream.

    ``call``, ``model``, ``counts`` and ``reports_usage``: see `ResponseContext`.
    """
    context = ResponseContext(
        request=request,
        call=call,
        model=model,
        prompts=[()] * max(1, len(request.prompts)),
        bytes_of=_no_bytes,
        answered=bool,
        known_counts=counts,
        reports_usage=reports_usage,
    )
    if request.stream:
        return EventStream(_write_events(dialect.stream_writer(context), choices, before))
    return JSONResponse(dialect.write_response(context, choices))


async def _write_events(
    writer: StreamWriter, choices: Sequence[Choice], before: AsyncGenerator[bytes] | None
) -> AsyncGenerator[bytes]:
    if before is not None:
        async for event in before:
            yield event
    for index, choice in enumerate(choices):
        yield writer.begin(index)
        if reasoning := choice.message.get("reasoning_content"):
            yield writer.think(index, str(reasoning))
        yield writer.finish(index, choice, str(choice.message.get("content") or ""))
    yield writer.end(choices)


def _no_bytes(token: int) -> None:
    """There are no tokens."""
