"""The policy endpoint: a server in the wire formats of OpenAI and Anthropic that knows the tokens, and who asked for them.

A request carries a per-rollout API key (which rollout, and may it) and an address in its headers (which agent, under which span). From
these the endpoint decides who answers:

- an agent that is trained: its live policy, at the run's own sampling temperature;
- an agent that the configuration gives a model to (``agents.frozen``), or that names one that is served here: that model, at the
  settings that the request asks for;
- any other: the configured upstream, or the provider that the request was on its way to.

Every response is a span of its rollout's trace; those that were sampled here hold their token ids and logprobs.

This module is the server. What becomes of one request is in ``service.py``, who answers it in ``answering.py``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_core.backends.backend import Backend
from lightning_core.chat.chat import Chat
from lightning_core.endpoint import otlp_receiver
from lightning_core.endpoint.dialects import DIALECTS, chat_completions, messages
from lightning_core.endpoint.dialects.dialect import Dialect
from lightning_core.endpoint.forward import EMBEDDINGS, Passing
from lightning_core.endpoint.limits import Limits
from lightning_core.endpoint.model_list import find_model, is_anthropic, list_models
from lightning_core.endpoint.receive import connection_class
from lightning_core.endpoint.request import Service, error_response
from lightning_core.endpoint.respond import Answering
from lightning_core.endpoint.sessions import UNKNOWN_KEY, Routing, Session, Sessions, stop
from lightning_core.endpoint.upstream import UpstreamServer
from lightning_core.errors import InfrastructureError, PolicyRequestError
from lightning_core.trace import Address, describe

__all__ = ["Limits", "PolicyEndpoint", "Routing"]

logger = logging.getLogger(__name__)

IDLE_SECONDS = 3600
"""How long an idle connection is kept. Clients drop theirs after seconds (httpx: 5, aiohttp: 15): were the server to do it first, a request
that is sent at that moment, as the first one after an update, would be lost."""

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class PolicyEndpoint:
    """Serves ``backend`` at ``url``. Start with ``with PolicyEndpoint(...) as endpoint:``; it listens on a thread of its own.

    On this machine only, unless ``host`` says otherwise; there is no encryption.
    """

    def __init__(
        self,
        backend: Backend,
        chat: Chat | Mapping[str, Chat],
        *,
        upstream: UpstreamServer | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
        sessions: Sessions | None = None,
        standalone: bool = False,
    ) -> None:
        """``chat``: the chat format of all models, or of each by its name.

        ``standalone``: answers come from ``backend`` only, whatever a request says of where it was going, and no spans are taken in."""
        limits = limits or Limits()
        self._backend = backend
        self._sessions = Sessions(limits) if sessions is None else sessions
        self._passing = Passing(upstream, to_origins=not standalone)
        self._spans = otlp_receiver.OtlpReceiver(limits)
        self._socket = socket.create_server((host, port))
        # asyncio sets this on sockets it makes itself; without it every answer waits some 40 ms for a delayed acknowledgement.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        chats = dict.fromkeys(backend.models, chat) if isinstance(chat, Chat) else chat
        answering = Answering(backend, chats, self._passing, limits)

        def serve(path: str, wire: Dialect, answer: Any) -> Route:
            return Route(f"/v1{path}", Service(wire, partial(answer, wire), self._sessions, limits), methods=["POST"])

        routes = [
            *(serve(wire.PATH, wire, answering.answer) for wire in DIALECTS),
            serve(EMBEDDINGS, chat_completions, self._passing.embed),
            Route("/v1/models", self._admitted(self._list_models), methods=["GET"]),
            Route("/v1/models/{model:path}", self._admitted(self._find_model), methods=["GET"]),
            *([] if standalone else [Route(otlp_receiver.PATH, self._traces, methods=["POST"])]),
            Route("/health", self._health, methods=["GET"]),
            Route("/{path:path}", self._admitted(self._no_such_api), methods=_METHODS),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers={Exception: _internal_error}),
            http=connection_class(limits),
            h11_max_incomplete_event_size=limits.header_bytes,
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="lightning-endpoint", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise InfrastructureError(f"the policy endpoint did not start at {self.url}")
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))
            runner.run(self._passing.close())

    def new_key(self) -> str:
        """An API key for one rollout; it opens nothing until `open`."""
        return self._sessions.new_key()

    def open(self, key: str, root: Address, routing: Routing, *, seed: int | None = None) -> None:
        """Admit requests with ``key`` as those of the rollout ``root``.

        With ``seed``, what a request samples depends on it, on the prompt, and on how often the rollout has sent that prompt
        before; not on what other rollouts do meanwhile.
        """
        self._sessions.open(key, Session(root=root, routing=routing, seed=seed))

    def close(self, key: str, timeout_seconds: float = 60.0) -> None:
        """Admit ``key`` no longer. Requests still running are aborted, and their spans closed, before this returns.

        Raises `InfrastructureError` if the endpoint is too busy for it. With thousands of rollouts that end at once that takes
        seconds, since a request counts as running until its handler has returned, after its client has the answer.
        """
        session = self._sessions.forget(key)
        if session is None:
            return
        if session.requests:  # what comes later finds the session closed, before it opens a span
            work = asyncio.run_coroutine_threadsafe(stop(session), self._loop)
            try:
                work.result(timeout_seconds)
            except TimeoutError:
                raise InfrastructureError(
                    f"the policy endpoint did not end a rollout's requests within {timeout_seconds:g} s"
                ) from None
        self._spans.close(session.root)

    def _admitted(self, answer: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        """A handler that tells nothing to those without a live key."""

        async def handle(request: Request) -> Response:
            wire = messages if is_anthropic(request.headers) else chat_completions
            try:
                if self._sessions.find(request.headers) is None:
                    raise PolicyRequestError(UNKNOWN_KEY, status=401)
                return answer(request)
            except PolicyRequestError as error:
                return error_response(wire, error)

        return handle

    def _list_models(self, request: Request) -> Response:
        return JSONResponse(list_models(self._backend.models, request.headers))

    def _find_model(self, request: Request) -> Response:
        return JSONResponse(find_model(self._backend.models, request.path_params["model"], request.headers))

    def _no_such_api(self, request: Request) -> Response:
        spoken = ", ".join(f"/v1{path}" for path in (*(wire.PATH for wire in DIALECTS), EMBEDDINGS))
        raise PolicyRequestError(
            f"the policy endpoint speaks POST {spoken} and GET /v1/models; found {request.method} {request.url.path}. "
            "Set the agent's client to one of these, or leave this provider out of rollouts.redirect_hosts",
            status=404,
        )

    async def _traces(self, request: Request) -> Response:
        session = self._sessions.find(request.headers)
        return await self._spans.receive(request, None if session is None else session.root)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})


async def _internal_error(request: Request, error: Exception) -> Response:
    logger.error("the policy endpoint failed", exc_info=error)
    return error_response(chat_completions, PolicyRequestError(describe(error), status=500))
