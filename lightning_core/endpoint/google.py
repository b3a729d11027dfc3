"""The paths of Google's Gemini API, below any version and project: the model and the method are in the last segments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lightning_core.dialects import gemini
from lightning_core.endpoint.request import IncomingRequest, RequestHandler
from lightning_core.endpoint.sessions import Sessions
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.trace import COUNT

Respond = Callable[[IncomingRequest], Awaitable[Response]]


def google_routes(respond: Respond, count: Respond, sessions: Sessions, limits: Limits) -> list[Route]:
    """The routes of the API. ``respond`` answers model calls, ``count`` counts their tokens."""

    def handler(answer: Respond, *, stream: bool = False, operation: str = "chat") -> RequestHandler:
        complete = partial(_complete, stream=stream)
        return RequestHandler(gemini, answer, sessions, limits, operation=operation, complete=complete)

    once, counting = handler(respond), handler(count, operation=COUNT)
    stream = _Streams(events=handler(respond, stream=True), array=handler(partial(_as_array, respond)))
    return [
        Route("/{name:path}:generateContent", once, methods=["POST"]),
        Route("/{name:path}:streamGenerateContent", stream, methods=["POST"]),
        Route("/{name:path}:countTokens", counting, methods=["POST"]),
    ]


def is_google(request: Request) -> bool:
    """Whether a request is from a client of Google's."""
    return "x-goog-api-key" in request.headers or "x-goog-api-client" in request.headers


def _complete(body: Any, request: Request, *, stream: bool) -> Any:
    return gemini.with_url(body, request.url.path, stream=stream)


class _Streams:
    """Server-sent events with ``alt=sse``, else a JSON array."""

    def __init__(self, *, events: RequestHandler, array: RequestHandler) -> None:
        self._events = events
        self._array = array

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._events if Request(scope).query_params.get("alt") == "sse" else self._array
        await handler(scope, receive, send)


async def _as_array(respond: Respond, incoming: IncomingRequest) -> Response:
    """The response as an array of one chunk: clients read an array as a whole."""
    response = await respond(incoming)
    if response.status_code != 200:
        return response
    return Response(b"[" + bytes(response.body) + b"]", media_type="application/json")
