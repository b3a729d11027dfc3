"""Forwards requests for models that are not served here, and records them.

They are never trained on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
from pydantic_core import to_json
from starlette.responses import Response

from lightning_core.capture.signatures import ORIGIN, ORIGIN_AUTHORIZATION
from lightning_core.chat.json_text import show_json
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.exchange import (
    ChatRequest,
    UpstreamResponse,
    model_name,
    stream_error,
)
from lightning_core.endpoint.forwarding.known_response import known_choice, write_known
from lightning_core.endpoint.forwarding.upstream import (
    Remote,
    UpstreamClient,
    UpstreamServer,
    origin_remote,
    read_answer,
    read_event,
    with_headers,
)
from lightning_core.endpoint.record import CallSpan, EmbeddingsSpan
from lightning_core.endpoint.request import IncomingRequest
from lightning_core.endpoint.transport.event_stream import EventStream
from lightning_core.errors import PolicyRequestError, UpstreamError, UpstreamRefusal, UpstreamStreamError, fold

EMBEDDINGS = "/embeddings"


class Forwarder:
    """Forwards requests to ``server``, or else (``to_origins``) to their provider."""

    def __init__(self, server: UpstreamServer | None, *, to_origins: bool = True) -> None:
        self._server = server
        self.to_origins = to_origins
        self._client = UpstreamClient(server)

    @property
    def has_server(self) -> bool:
        """Whether requests go to a configured server instead of their provider."""
        return self._server is not None

    async def send(self, remote: Remote, headers: Mapping[str, str], data: bytes) -> httpx.Response:
        """See `UpstreamClient.send`."""
        return await self._client.send(remote, headers, data)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def remote(
        self, headers: Mapping[str, str], path: str, *, key_header: str, forwarded_headers: Sequence[str]
    ) -> Remote | None:
        """The server and URL for a request to ``path``, or None."""
        forwarded = {name: headers[name] for name in forwarded_headers if name in headers}
        if self._server is not None:
            return with_headers(self._server.remote(path, key_header), forwarded)
        origin = headers.get(ORIGIN) if self.to_origins else None
        return with_headers(origin_remote(origin, headers.get(ORIGIN_AUTHORIZATION)), forwarded) if origin else None

    async def forward(
        self,
        dialect: Dialect,
        incoming: IncomingRequest,
        request: ChatRequest,
        remote: Remote,
        *,
        trained: bool = False,
    ) -> Response:
        """The response of ``remote``, unchanged. ``trained``: the agent is trained, and ``remote`` stands in for its policy."""
        if request.upstream_url is not None:
            remote = replace(remote, url=request.upstream_url(remote.url))
        spans, body = await incoming.off_loop(partial(_begin, incoming, request, remote, trained))
        if self._server is not None:  # its traces continue those of the rollouts
            context = replace(incoming.address, span=spans[0].id).to_headers()["traceparent"]
            remote = with_headers(remote, {"traceparent": context})
        if request.stream:
            events = self._stream(dialect, incoming, request, spans, body, remote)
            first = await anext(events, b"")  # HTTP errors are raised here, before the status is sent
            return EventStream(_continue(first, events), close=events.aclose)
        data = await self._client.complete(remote, body)

        def record() -> None:
            answer = read_answer(remote, data)
            if (failure := stream_error(answer)) is not None:  # gateways report errors so too
                text = f"{remote.shown} reported an error with the status 200: {fold(failure.message, 240)}"
                raise UpstreamRefusal(text, status=400 if failure.is_request_error else 502, body=data)
            _record(incoming, request, spans, dialect.read_response(answer), remote)

        await incoming.off_loop(record, size=len(data))
        return Response(data, media_type="application/json")

    async def complete(
        self, incoming: IncomingRequest, remote: Remote, body: Mapping[str, Any]
    ) -> tuple[bytes, Mapping[str, Any]]:
        """The response of ``remote`` to ``body``, as bytes and as JSON; see `UpstreamClient.complete`."""
        data = await self._client.complete(remote, await incoming.off_loop(partial(to_json, body)))
        return data, await incoming.off_loop(partial(read_answer, remote, data), size=len(data))

    async def _stream(
        self,
        dialect: Dialect,
        incoming: IncomingRequest,
        request: ChatRequest,
        spans: list[CallSpan],
        body: bytes,
        remote: Remote,
    ) -> AsyncGenerator[bytes]:
        """The events, unchanged.

        They are recorded before the last one is sent, after which a client may disconnect.
        """
        reader = dialect.stream_reader()
        recorded, size = False, 0

        def read(event: bytes) -> bool:
            """Read ``event``; return whether it is the last one."""
            data = read_event(remote, event)
            if data is None:
                return b"[DONE]" in event
            if (failure := stream_error(data)) is not None:
                raise UpstreamStreamError(
                    f"{remote.shown} reported an error in the stream: {fold(failure.message, 240)}",
                    event=event,
                    is_request_error=failure.is_request_error,
                )
            reader.read(data)
            return reader.over

        def record() -> None:
            _record(incoming, request, spans, reader.responses(), remote)

        async for event in self._client.stream(remote, body):
            size += len(event)
            if await incoming.off_loop(partial(read, event), size=len(event)) and not recorded:
                await incoming.off_loop(record, size=size)
                recorded = True
            yield event
        if not recorded:
            await incoming.off_loop(record, size=size)

    async def embed(self, dialect: Dialect, incoming: IncomingRequest) -> Response:
        """Forward a request for embeddings, which no model here computes."""
        model = model_name(incoming.body)
        remote = self.remote(
            incoming.headers, EMBEDDINGS, key_header=dialect.KEY_HEADER, forwarded_headers=dialect.FORWARDED_HEADERS
        )
        if remote is None:
            advice = ". Give the embeddings client the URL of its provider"
            if self.to_origins:
                advice = (
                    f", and there is no server to forward the request for {show_json(model)} to: set policy.upstream, or give the "
                    "agent's embeddings client the URL of its provider"
                )
            raise PolicyRequestError(
                f"the models here compute no embeddings{advice}",
                status=404,
                param="model",
            )
        span = EmbeddingsSpan(incoming.address, incoming.body, model)
        incoming.spans.append(span)
        data, response = await self.complete(incoming, remote, incoming.body)
        usage = response.get("usage")
        span.counted(response.get("model"), usage.get("prompt_tokens") if isinstance(usage, Mapping) else None)
        span.end()
        return Response(data, media_type="application/json")


def _begin(
    incoming: IncomingRequest, request: ChatRequest, remote: Remote, trained: bool
) -> tuple[list[CallSpan], bytes]:
    """The open spans of ``request``, and its body."""
    address, model = incoming.address, request.model
    spans = [CallSpan(address, request, model, i, trained=trained, remote=remote) for i in range(request.choices)]
    incoming.spans += spans
    return spans, to_json(request.body)


async def _continue(first: bytes, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for event in events:
        yield event


def _record(
    incoming: IncomingRequest,
    request: ChatRequest,
    spans: list[CallSpan],
    responses: list[UpstreamResponse],
    remote: Remote,
) -> None:
    """Record the responses of ``remote``, and the conversation that a later request may continue by the id of its response.

    Raises `UpstreamError` if there are more or fewer than requested.
    """
    if len(responses) != len(spans):
        raise UpstreamError(f"{remote.shown} returned {len(responses)} complete responses; expected {len(spans)}")
    for span, response in zip(spans, responses, strict=True):
        span.forwarded(response)
        span.end()
        if request.history is not None and response.conversation is not None:
            incoming.session.conversations[response.conversation] = (*request.history, response.message)


def answer_recorded(
    dialect: Dialect, incoming: IncomingRequest, request: ChatRequest, remote: Remote
) -> Response | None:
    """The recorded responses to a request that would be forwarded; None if one of them is not recorded."""
    recorded, agent = incoming.session.recorded, incoming.address.agent
    if recorded is None:
        return None
    found = [recorded.take_forwarded(agent, request.input_messages(i)) for i in range(request.choices)]
    calls = [call for call in found if call is not None]
    if len(calls) < len(found):
        return None
    spans = [CallSpan(incoming.address, request, request.model, i, remote=remote) for i in range(request.choices)]
    choices = [known_choice(call.response, call.finish_reason) for call in calls]
    for span, call, choice in zip(spans, calls, choices, strict=True):
        span.replays(call.replays or call.id)
        span.answered(choice.message, choice.finish_reason)
        span.end()
    return write_known(dialect, request, choices, call=spans[0].id, model=request.model)
