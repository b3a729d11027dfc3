"""The policy endpoint: serves OpenAI's, Anthropic's and Google's APIs, records every token.

The API key of a request names its rollout, and its headers the agent and the parent span. The endpoint routes it:

- trained agents: to their live policy, at the sampling temperature of the run;
- agents under ``agents.frozen``, and requests that name a model served here: to that model, at the settings of the request;
- all other agents: to ``policy.upstream`` if set, otherwise to their original provider.

Every response becomes a span of its rollout's trace, with token ids and logprobs if it was sampled here.

This module is the server; the lifecycle of a request is in ``request.py``, routing in ``respond.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Self

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_core.backends.backend import Backend
from lightning_core.capture import find_rollout
from lightning_core.capture.address import Address
from lightning_core.capture.context import outside_rollout
from lightning_core.chat.chat import Chat, Memory
from lightning_core.chat.json_text import show_json
from lightning_core.dialects import ALL_DIALECTS, DIALECTS, gemini
from lightning_core.dialects import openai_chat as chat_completions
from lightning_core.dialects import openai_responses as responses
from lightning_core.dialects.dialect import Dialect
from lightning_core.endpoint import child_records, otlp_receiver
from lightning_core.endpoint.activity import Silence, calls_of, silence_of, waited_by
from lightning_core.endpoint.agents.agent_urls import AddressedApp
from lightning_core.endpoint.agents.known_agents import KnownAgents, Verdict
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.child_records import ChildRecords
from lightning_core.endpoint.count import COMPACT, COUNTS, GEMINI, compact, count_tokens
from lightning_core.endpoint.forwarding.forward import EMBEDDINGS, Forwarder
from lightning_core.endpoint.forwarding.passthrough import Passthrough
from lightning_core.endpoint.forwarding.upstream import UpstreamServer
from lightning_core.endpoint.google import google_routes
from lightning_core.endpoint.recorded import RecordedResponses
from lightning_core.endpoint.refusals import (
    address_of,
    credentials,
    error_response,
    record_refusal,
    refuse_unknown_key,
)
from lightning_core.endpoint.request import RequestHandler
from lightning_core.endpoint.respond import Responder
from lightning_core.endpoint.sessions import UNKNOWN_KEY, Session, Sessions, stop
from lightning_core.endpoint.transport.direct_routes import DirectRoutes
from lightning_core.endpoint.transport.guard import Guard, Protection, dialect_of, is_anthropic
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.transport.listening import ServerThread, listen
from lightning_core.errors import InfrastructureError, PolicyRequestError, describe
from lightning_core.trace import COUNT

__all__ = ["Limits", "PolicyEndpoint", "Routing"]

logger = logging.getLogger(__name__)

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class PolicyEndpoint:
    """Serves ``backend`` at ``url`` on its own thread, as a context manager.

    It listens on 127.0.0.1 unless ``host`` is set.
    """

    def __init__(
        self,
        backend: Backend,
        chat: Chat | Mapping[str, Chat],
        *,
        upstream: UpstreamServer | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        limits: Limits | None = None,
        sessions: Sessions | None = None,
        standalone: bool = False,
        protection: Protection | None = None,
    ) -> None:
        """``chat``: the chat format of all models, or a chat format for each model name.

        ``public_url``: the base URL that programs of agents get, if they do not reach the endpoint at `url`, such as those in
        containers and on other machines. ``standalone``: requests are never forwarded to their original provider, and spans
        are not received. Raises `ConfigError` if it cannot listen at ``host`` and ``port``.
        """
        limits, protection = limits or Limits(), protection or Protection()
        tls = protection.tls
        self._backend = backend
        self._sessions = Sessions(limits) if sessions is None else sessions
        self._forwarder = Forwarder(upstream, to_origins=not standalone)
        self._spans = otlp_receiver.OtlpReceiver(self._sessions, limits)
        listening, self.url = listen(host, port, tls)
        self.public_url = None if public_url is None else f"{public_url.rstrip('/').removesuffix('/v1')}/v1"
        chats = defaultdict(lambda: chat) if isinstance(chat, Chat) else chat
        self._known_agents = KnownAgents()
        responder = Responder(backend, chats, self._forwarder, self._known_agents, limits)

        def serve(path: str, dialect: Dialect, respond: Any, operation: str = "chat") -> Route:
            handler = RequestHandler(dialect, respond, self._sessions, limits, operation=operation)
            return Route(f"/v1{path}", handler, methods=["POST"])

        count = partial(count_tokens, responder, self._forwarder)
        routes = [
            *(serve(dialect.PATH, dialect, partial(responder.respond, dialect)) for dialect in DIALECTS),
            *(serve(counter.path, counter.dialect, partial(count, counter), COUNT) for counter in COUNTS),
            serve(COMPACT, responses, partial(compact, responder, self._forwarder)),
            serve(EMBEDDINGS, chat_completions, partial(self._forwarder.embed, chat_completions), "embeddings"),
            *google_routes(partial(responder.respond, gemini), partial(count, GEMINI), self._sessions, limits),
            Passthrough(responder, self._forwarder, self._sessions, limits).route,
            Route("/v1/models", self._admitted(self._list_models), methods=["GET"]),
            Route("/v1/models/{model:path}", self._admitted(self._find_model), methods=["GET"]),
            *([] if standalone else [Route(otlp_receiver.PATH, self._spans.receive, methods=["POST"])]),
            Route(child_records.PATH, ChildRecords(self._sessions, limits).receive, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/{path:path}", self._admitted(self._no_such_api), methods=_METHODS),
        ]
        direct = Middleware(DirectRoutes, routes)
        app = Starlette(routes=routes, middleware=[direct], exception_handlers={Exception: _internal_error})
        guarded = Guard(app, self._sessions, protection, host, [self.public_url or ""])
        self._server = ServerThread(
            AddressedApp(guarded, self._sessions),
            listening,
            self._serve,
            name="lightning-endpoint",
            tls=tls,
            limits=limits,
            ending_seconds=2,
        )

    def __enter__(self) -> Self:
        self._server.start(f"the policy endpoint did not start at {self.url}")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def _serve(self) -> None:
        # Forwarded requests belong to no agent: the agent has already made them.
        with outside_rollout(), self._server.runner() as runner:
            self._sessions.lag.start(self._server.loop)
            runner.run(self._server.serve())
            self._sessions.lag.stop()
            runner.run(self._forwarder.close())
            self._sessions.large_work.close()

    @property
    def is_serving(self) -> bool:
        """Whether it still answers requests."""
        return self._server.is_serving

    def new_key(self) -> str:
        """A new API key for one rollout, to pass to `open`."""
        return self._sessions.new_key()

    def url_of(self, key: str) -> str:
        """The base URL for requests with ``key``."""
        return self.url

    def open(
        self,
        key: str,
        root: Address,
        routing: Routing,
        *,
        seed: int | None = None,
        recorded: RecordedResponses | None = None,
        max_calls: int | None = None,
    ) -> None:
        """Admit requests with ``key`` as requests of the rollout ``root``. ``recorded``: responses to answer with.

        ``max_calls``: most model calls of its agents.

        With ``seed``, the seed of a response depends only on it, on the prompt and on how often the rollout sent that prompt
        before, not on other rollouts.
        """
        run = find_rollout(root.rollout)
        secret = None if run is None else run.secret
        session = Session(root=root, routing=routing, seed=seed, secret=secret, recorded=recorded, max_calls=max_calls)
        session.memory = Memory(None if run is None else run.content)
        self._sessions.open(key, session)

    def begin(self, key: str) -> None:
        """The rollout's agent starts."""
        if (session := self._sessions.get(key)) is not None:
            session.begin()

    def silence(self, key: str) -> Silence:
        """See `silence_of`."""
        return silence_of(self._sessions.get(key))

    def calls(self, key: str) -> tuple[int, float]:
        """See `calls_of`."""
        return calls_of(self._sessions.get(key))

    def waited(self, key: str) -> float:
        """See `waited_by`."""
        return waited_by(self._sessions.get(key))

    def verdict(self, key: str) -> Verdict:
        """Whether the calls so far were answered by the right models; to be called before `close`."""
        session = self._sessions.get(key)
        return "keep" if session is None else self._known_agents.verdict(session)

    def close(self, key: str, timeout_seconds: float = 60.0) -> None:
        """Stop admitting ``key``.

        Requests in progress are aborted and their spans ended before this returns.

        Raises `InfrastructureError` after ``timeout_seconds``. Thousands of rollouts that end at once take seconds, because a request
        is in progress until its handler returns, after its client has the response.
        """
        session = self._sessions.forget(key)
        if session is None:
            return
        if session.waiting.requests:  # later requests find the session closed before they open a span
            work = asyncio.run_coroutine_threadsafe(stop(session), self._server.loop)
            try:
                work.result(timeout_seconds)
            except TimeoutError:
                raise InfrastructureError(
                    f"the policy endpoint did not abort the requests of a rollout within {timeout_seconds:g} s"
                ) from None
        otlp_receiver.join_received(session.root, self._spans.take(session.root))

    def _admitted(self, respond: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        """A handler that requires the key of a live rollout. A refused POST may be a model call, and is recorded."""

        async def handle(request: Request) -> Response:
            session = self._sessions.find(credentials(request))
            try:
                if session is None:
                    if request.method == "POST":
                        raise refuse_unknown_key(request, self._sessions, "chat")
                    raise PolicyRequestError(UNKNOWN_KEY, status=401)
                return respond(request)
            except PolicyRequestError as error:
                if session is not None and request.method == "POST":
                    address = address_of(request.headers, session)
                    record_refusal(session, address, "chat", request.url.path, None, error)
                return error_response(dialect_of(request), error)

        return handle

    def _list_models(self, request: Request) -> Response:
        models, headers = self._backend.models, request.headers
        data = [_model(model, headers) for model in models]
        if is_anthropic(headers):
            return JSONResponse({"data": data, "has_more": False, "first_id": models[0], "last_id": models[-1]})
        return JSONResponse({"object": "list", "data": data})

    def _find_model(self, request: Request) -> Response:
        name, models = request.path_params["model"], self._backend.models
        if name not in models:
            raise PolicyRequestError(
                f"model {show_json(name)} is not served here; the models are {list(models)!r}",
                status=404,
                param="model",
            )
        return JSONResponse(_model(name, request.headers))

    def _no_such_api(self, request: Request) -> Response:
        paths = ", ".join(f"/v1{path}" for path in (*(dialect.PATH for dialect in ALL_DIALECTS), EMBEDDINGS))
        advice = "Use one of these in the client"
        if self._forwarder.to_origins:
            advice = "Use one of these in the agent's client, or add its host to rollouts.ignore_hosts"
        raise PolicyRequestError(
            f"the policy endpoint has no {request.method} {request.url.path}; it supports POST {paths} and GET /v1/models. {advice}",
            status=404,
        )

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})


def _model(name: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """The body of ``GET /v1/models/NAME``."""
    if is_anthropic(headers):
        created = "1970-01-01T00:00:00Z"
        return {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "lightning"}


async def _internal_error(request: Request, error: Exception) -> Response:
    logger.error("the policy endpoint failed", exc_info=error)
    return error_response(chat_completions, PolicyRequestError(describe(error), status=500))
