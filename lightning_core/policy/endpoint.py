"""The policy endpoint: an OpenAI-compatible server that knows the tokens, and who asked for them.

A request carries a per-rollout API key (which rollout, and may it) and an address in its headers (which agent, under which span). From
these the endpoint decides who answers:

- an agent that is trained: the live policy, at the run's own sampling temperature;
- an agent that the configuration gives a model to (``agents.frozen``), or that names one that is served here: that model, at the
  settings that the request asks for;
- any other: the configured upstream, or the provider that the request was on its way to.

Every response is a span of its rollout's trace; those that were sampled here hold their token ids and logprobs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_core.errors import InfrastructureError, PolicyRequestError, UpstreamError
from lightning_core.policy.backend import Backend
from lightning_core.policy.chat import Chat
from lightning_core.policy.client import ORIGIN, ORIGIN_AUTHORIZATION
from lightning_core.policy.dialects import chat_completions as wire
from lightning_core.policy.dialects.chat_completions import ChatRequest
from lightning_core.policy.recording import CallSpan
from lightning_core.policy.sampling import POLICY, Routing, Sampler, SamplingJob, Session, abandon, count_failure
from lightning_core.policy.upstream import Target, Upstream, origin_target
from lightning_core.trace import Address, describe

logger = logging.getLogger(__name__)


class PolicyEndpoint:
    """Serves ``backend`` at ``url``. Start with ``with PolicyEndpoint(...) as endpoint:``; it listens on a thread of its own."""

    def __init__(
        self,
        backend: Backend,
        chat: Chat,
        *,
        upstream: Target | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._backend = backend
        self._chat = chat
        self._sampler = Sampler(backend, chat)
        self._upstream = upstream
        self._forward = Upstream()
        self._sessions: dict[str, Session] = {}
        self._socket = socket.create_server((host, port))
        # asyncio sets this on sockets it makes itself; without it every answer waits some 40 ms for a delayed acknowledgement.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        routes = [
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/{path:path}", _no_such_api, methods=["GET", "POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={Exception: _internal_error})
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2)
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
            runner.run(self._forward.close())

    def new_key(self) -> str:
        """An API key for one rollout; it opens nothing until `open`."""
        return f"lr-{secrets.token_urlsafe(24)}"

    def open(self, key: str, root: Address, routing: Routing, *, seed: int | None = None) -> None:
        """Admit requests with ``key`` as those of the rollout ``root``.

        With ``seed``, what a request samples depends on it, on the prompt, and on how often the rollout has sent that prompt
        before; not on what other rollouts do meanwhile.
        """
        self._sessions[key] = Session(root=root, routing=routing, seed=seed)

    def close(self, key: str, timeout_seconds: float = 5.0) -> None:
        """Admit ``key`` no longer. Requests still running are aborted, and their spans closed, before this returns."""
        session = self._sessions.pop(key, None)
        if session is not None and session.tasks:
            asyncio.run_coroutine_threadsafe(_cancel(session.tasks), self._loop).result(timeout_seconds)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        if self._session(request) is None:
            return _error("unknown API key", 401, "authentication_error")
        models = [{"id": m, "object": "model", "created": 0, "owned_by": "lightning"} for m in self._backend.models]
        return JSONResponse({"object": "list", "data": models})

    def _session(self, request: Request) -> Session | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None

    async def _chat_completions(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            return _error(
                "unknown API key: requests to a policy endpoint carry the key of a live rollout",
                401,
                "authentication_error",
            )
        address = Address.from_headers(request.headers)
        if address is None or address.rollout != session.root.rollout:
            address = session.root  # a process of its own knows its key but perhaps not its place
        task = asyncio.current_task()
        assert task is not None
        session.tasks.add(task)
        try:
            body = await request.json()
            # A configured model takes the place of the one that the agent names, here and upstream.
            body = _with_model(body, session.routing, address.agent)
            model = self._route(session.routing, address.agent, body["model"], request)
            # What somebody else's model can do is for them to say.
            parsed = wire.parse_request(body, check=not isinstance(model, Target))
            if isinstance(model, Target):
                return await self._pass_on(session, address, parsed, body, model)
            return await self._sample(session, address, parsed, model, request)
        except PolicyRequestError as error:
            return _error(str(error), error.status, "invalid_request_error", error.param)
        except json.JSONDecodeError as error:
            return _error(f"the request body is not JSON: {error}", 400, "invalid_request_error")
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is an infrastructure failure of this rollout
            count_failure(address, error)
            return _error(describe(error), 502 if isinstance(error, UpstreamError) else 500, "server_error")
        finally:
            session.tasks.discard(task)

    def _route(self, routing: Routing, agent: str | None, requested: str, http: Request) -> str | Target:
        if agent is not None and agent in routing.trained:
            return POLICY
        if requested in self._backend.models:
            return requested
        if self._upstream is not None:
            return self._upstream
        origin = http.headers.get(ORIGIN)
        if origin:
            return origin_target(origin, http.headers.get(ORIGIN_AUTHORIZATION))
        raise PolicyRequestError(
            f"agent {agent!r} is not trained and asks for model {requested!r}, which is not served here; served are "
            f"{list(self._backend.models)!r}. Train the agent, give it a model under agents.frozen, or set policy.upstream",
            status=404,
            param="model",
        )

    async def _sample(
        self, session: Session, address: Address, request: ChatRequest, model: str, http: Request
    ) -> Response:
        """Answer from the backend: render once, sample n responses, record each."""
        spans = [CallSpan(address, request, model) for _ in range(request.n)]
        try:
            prompt = self._chat.render(request.messages, request.tools, session.memory)
            trained = address.agent is not None and address.agent in session.routing.trained
            params = self._sampler.params(session, request, prompt, trained=trained)
        except BaseException as error:
            abandon(spans, error)
            raise
        job = SamplingJob(session, address, request, model, prompt, params)
        if request.stream:
            return StreamingResponse(
                _counted(session, self._sampler.stream(job, spans)), media_type="text/event-stream"
            )
        try:
            choices = await _unless_disconnected(
                asyncio.gather(*(self._sampler.respond(job, span, i) for i, span in enumerate(spans))), http
            )
        except BaseException as error:
            abandon(spans, error)
            raise
        decode = self._chat.text
        return JSONResponse(
            wire.completion(
                request, choices, id=f"chatcmpl-{spans[0].id}", model=model, prompt_ids=prompt.ids, decode=decode
            )
        )

    async def _pass_on(
        self, session: Session, address: Address, request: ChatRequest, body: Mapping[str, Any], target: Target
    ) -> Response:
        """Let somebody else's model answer, and record what it said."""
        span = CallSpan(address, request, request.model)
        if request.stream:
            return StreamingResponse(
                _counted(session, self._pass_on_stream(span, address, body, target)), media_type="text/event-stream"
            )
        try:
            answer = await self._forward.complete(target, body)
            span.forwarded(answer)
        except BaseException as error:
            span.fail(error)
            raise
        finally:
            span.end()
        return JSONResponse(answer)

    async def _pass_on_stream(
        self, span: CallSpan, address: Address, body: Mapping[str, Any], target: Target
    ) -> AsyncGenerator[bytes]:
        text, finish = "", None
        try:
            async for event, data in self._forward.stream(target, body):
                for choice in (data or {}).get("choices") or ():
                    if choice.get("index") == 0:
                        text += (choice.get("delta") or {}).get("content") or ""
                        finish = choice.get("finish_reason") or finish
                yield event
            span.answered({"role": "assistant", "content": text}, finish)
        except InfrastructureError as error:
            count_failure(address, error)
            span.fail(error)
            yield b"data: " + json.dumps(wire.error_body(str(error), kind="server_error")).encode() + b"\n\n"
        finally:
            span.end()


def _with_model(body: Any, routing: Routing, agent: str | None) -> dict[str, Any]:
    requested = wire.model_name(body)
    return {**body, "model": routing.frozen.get(agent or "", requested)}


async def _counted(session: Session, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """``events``, whose sending counts as work of the session until it is over."""
    task = asyncio.current_task()
    assert task is not None
    session.tasks.add(task)
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()
        session.tasks.discard(task)


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    pending = list(tasks)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


async def _unless_disconnected(work: asyncio.Future[Any], request: Request) -> Any:
    """The result of ``work``, which is aborted if the client hangs up first."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch: asyncio.Task[None] = asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise PolicyRequestError("the client closed the connection before the response was complete", status=499)
        return work.result()
    finally:
        watch.cancel()
        work.cancel()


async def _no_such_api(request: Request) -> Response:
    return _error(
        f"the policy endpoint speaks POST /v1/chat/completions and GET /v1/models; found {request.method} {request.url.path}. "
        "Set the agent's client to chat completions, or leave this provider out of rollouts.redirect_hosts",
        404,
        "invalid_request_error",
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    logger.error("the policy endpoint failed", exc_info=error)
    return _error(describe(error), 500, "server_error")


def _error(message: str, status: int, kind: str, param: str | None = None) -> Response:
    return JSONResponse(wire.error_body(message, kind=kind, param=param), status_code=status)
