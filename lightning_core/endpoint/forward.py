"""Requests that somebody else's model answers: passed on as they came, recorded, and never trained on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from lightning_core.capture.http_clients import ORIGIN, ORIGIN_AUTHORIZATION
from lightning_core.endpoint.dialects.dialect import Dialect
from lightning_core.endpoint.dialects.exchange import Answer, ChatRequest, model_name
from lightning_core.endpoint.record import CallSpan, EmbeddingsSpan
from lightning_core.endpoint.request import Asked, EventStream
from lightning_core.endpoint.upstream import Target, Upstream, UpstreamServer, origin_target, with_headers
from lightning_core.errors import PolicyRequestError, UpstreamError

EMBEDDINGS = "/embeddings"


class Passing:
    """Passes requests on: to ``server``, if there is one, or else (``to_origins``) to the provider that they were on their way to."""

    def __init__(self, server: UpstreamServer | None, *, to_origins: bool = True) -> None:
        self._server = server
        self.to_origins = to_origins
        self._client = Upstream()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def target(
        self, headers: Mapping[str, str], path: str, *, key_header: str, passed_headers: Sequence[str]
    ) -> Target | None:
        """Where a request to ``path`` with ``headers`` goes; None if there is nobody to ask."""
        passed = {name: headers[name] for name in passed_headers if name in headers}
        if self._server is not None:
            return with_headers(self._server.target(path, key_header), passed)
        origin = headers.get(ORIGIN) if self.to_origins else None
        return with_headers(origin_target(origin, headers.get(ORIGIN_AUTHORIZATION)), passed) if origin else None

    async def pass_on(self, wire: Dialect, asked: Asked, request: ChatRequest, target: Target) -> Response:
        """The answer of ``target``, as it came."""
        spans = [CallSpan(asked.address, request, request.model, i) for i in range(request.choices)]
        asked.spans += spans
        if request.stream:
            events = self._stream(wire, spans, request.body, target)
            first = await anext(events, b"")  # a refusal is heard of here, before the answer has a status
            return EventStream(_continue(first, events))
        data, answer = await self._client.complete(target, request.body)
        _record(spans, wire.read_answer(answer), target)
        return Response(data, media_type="application/json")

    async def _stream(
        self, wire: Dialect, spans: list[CallSpan], body: Mapping[str, Any], target: Target
    ) -> AsyncGenerator[bytes]:
        """The events as they come. The answer is recorded before the last of them, after which a client may hang up."""
        reader = wire.stream_reader()
        recorded = False
        async for event, data in self._client.stream(target, body):
            if data is not None:
                reader.read(data)
            if not recorded and (reader.over or (data is None and b"[DONE]" in event)):
                _record(spans, reader.answers(), target)
                recorded = True
            yield event
        if not recorded:
            _record(spans, reader.answers(), target)

    async def embed(self, wire: Dialect, asked: Asked) -> Response:
        """Embeddings, which no model here makes."""
        model = model_name(asked.body)
        target = self.target(asked.headers, EMBEDDINGS, key_header=wire.KEY_HEADER, passed_headers=wire.PASSED_HEADERS)
        if target is None:
            raise PolicyRequestError(
                f"no model here makes embeddings, and there is nobody to pass a request for {model!r} on to: set policy.upstream, or "
                "give the agent's client for embeddings the provider's own URL",
                status=404,
                param="model",
            )
        span = EmbeddingsSpan(asked.address, asked.body, model)
        asked.spans.append(span)
        data, answer = await self._client.complete(target, asked.body)
        usage = answer.get("usage")
        span.counted(answer.get("model"), usage.get("prompt_tokens") if isinstance(usage, Mapping) else None)
        span.end()
        return Response(data, media_type="application/json")


async def _continue(first: bytes, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


def _record(spans: list[CallSpan], answers: list[Answer], target: Target) -> None:
    """Note what somebody else's server answered. Raises `UpstreamError` if that is not what was asked for."""
    if len(answers) != len(spans):
        raise UpstreamError(
            f"{target.url} gave {len(answers)} complete answers that can be recorded; expected {len(spans)}"
        )
    for span, answer in zip(spans, answers, strict=True):
        span.forwarded(answer)
        span.end()
