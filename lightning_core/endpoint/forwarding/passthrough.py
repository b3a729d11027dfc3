"""Model calls in wire formats that the endpoint does not have, such as Ollama's, Cohere's and Bedrock's.

Calls of agents that are not trained are forwarded to their provider byte for byte, with all their headers, so signatures stay valid.
They are recorded without a response. Calls that a model of the run must answer are refused.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lightning_core.capture.address import AGENT_HEADER, MARK_HEADER
from lightning_core.capture.signatures import ORIGIN, ORIGIN_AUTHORIZATION, SIGNATURE
from lightning_core.dialects.unknown import SUPPORTED, OtherFormat
from lightning_core.endpoint.forwarding.forward import Forwarder
from lightning_core.endpoint.forwarding.upstream import Remote, check_status
from lightning_core.endpoint.record import CallSpan
from lightning_core.endpoint.request import IncomingRequest, RequestHandler
from lightning_core.endpoint.respond import Responder
from lightning_core.endpoint.sessions import Sessions
from lightning_core.endpoint.transport.event_stream import EventStream
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.errors import PolicyRequestError, UpstreamRefusal
from lightning_core.propagation.shapes import ORIGIN_PATH

_OWN = frozenset({ORIGIN, ORIGIN_AUTHORIZATION, SIGNATURE, AGENT_HEADER, MARK_HEADER, "authorization", "traceparent"})
# Headers of one connection, which are not forwarded; the new connection has its own ``host`` and ``content-length``.
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip


class Passthrough:
    """An ASGI app for the paths under `ORIGIN_PATH`."""

    def __init__(self, responder: Responder, forwarder: Forwarder, sessions: Sessions, limits: Limits) -> None:
        self._responder = responder
        self._forwarder = forwarder
        self._sessions = sessions
        self._limits = limits

    @property
    def route(self) -> Route:
        """The route of the app."""
        return Route(f"/v1{ORIGIN_PATH}{{path:path}}", self, methods=["POST"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, with errors as its client expects them."""
        path = Request(scope).path_params["path"]
        respond = partial(self._respond, OtherFormat(path))
        await RequestHandler(OtherFormat(path), respond, self._sessions, self._limits)(scope, receive, send)

    async def _respond(self, api: OtherFormat, incoming: IncomingRequest) -> Response:
        model, request, _ = await self._responder.read(api, incoming, api.PATH)
        if not isinstance(model, Remote):  # not reached: such a request is refused while it is parsed
            raise TypeError(f"expected an upstream server, found the model {model!r}")
        frozen = incoming.session.routing.frozen_model(incoming.address.agent)
        if self._forwarder.has_server or frozen is not None:
            where = f"the model {frozen!r} under agents.frozen" if frozen is not None else "policy.upstream"
            raise PolicyRequestError(
                f"calls of agent {incoming.address.agent!r} go to {where}, which cannot be done for the API {api.PATH}. Use a client of "
                f"{SUPPORTED}"
            )
        incoming.open_call()
        span = CallSpan(incoming.address, request, request.model, remote=model)
        incoming.spans.append(span)
        response = await self._forwarder.send(model, _headers(incoming, model), incoming.data)
        try:
            check_status(model, response)
        except UpstreamRefusal as error:
            span.abandon(error)
            if not error.is_request_error:
                incoming.fail(error)
        stream = EventStream(_parts(response, span), close=response.aclose)
        stream.status_code = response.status_code
        stream.raw_headers = [
            (name.lower(), value) for name, value in response.headers.raw if _is_forwarded(name.decode())
        ]
        return stream


def _is_forwarded(name: str) -> bool:
    return name.lower() not in _HOP_BY_HOP


def _headers(incoming: IncomingRequest, remote: Remote) -> dict[str, str]:
    kept = {name: value for name, value in incoming.headers.items() if name not in (*_OWN, *_HOP_BY_HOP, "host")}
    return {**kept, **remote.headers}


async def _parts(response: httpx.Response, span: CallSpan) -> AsyncGenerator[bytes]:
    """The bytes of the response as they arrive. The span ends before the last ones are sent."""
    async for part in response.aiter_raw():
        yield part
    span.end()
