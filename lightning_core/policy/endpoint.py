"""The policy endpoint: a server in the wire formats of OpenAI and Anthropic that knows the tokens, and who asked for them.

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
from functools import partial
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_core.errors import InfrastructureError, PolicyRequestError, UpstreamError
from lightning_core.policy import otlp_receiver
from lightning_core.policy.backend import Backend
from lightning_core.policy.chat import Chat
from lightning_core.policy.client import ORIGIN, ORIGIN_AUTHORIZATION
from lightning_core.policy.dialects import DIALECTS
from lightning_core.policy.dialects.dialect import Dialect
from lightning_core.policy.dialects.exchange import Answer, ChatRequest, Reply, model_name
from lightning_core.policy.recording import CallSpan
from lightning_core.policy.sampling import POLICY, Routing, Sampler, SamplingJob, Session, abandon, count_failure
from lightning_core.policy.upstream import Target, Upstream, UpstreamServer, origin_target, with_headers
from lightning_core.trace import Address, describe

logger = logging.getLogger(__name__)

IDLE_SECONDS = 3600
"""How long an idle connection is kept. Clients drop theirs after seconds (httpx: 5, aiohttp: 15): were the server to do it first, a request
that is sent at that moment, as the first one after an update, would be lost."""


class PolicyEndpoint:
    """Serves ``backend`` at ``url``. Start with ``with PolicyEndpoint(...) as endpoint:``; it listens on a thread of its own."""

    def __init__(
        self,
        backend: Backend,
        chat: Chat,
        *,
        upstream: UpstreamServer | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._backend = backend
        self._chat = chat
        self._sampler = Sampler(backend, chat)
        self._upstream = upstream
        self._forward = Upstream()
        self._sessions: dict[str, Session] = {}
        self._spans = otlp_receiver.OtlpReceiver()
        self._socket = socket.create_server((host, port))
        # asyncio sets this on sockets it makes itself; without it every answer waits some 40 ms for a delayed acknowledgement.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        routes = [
            *(Route(f"/v1{wire.PATH}", partial(self._ask, wire), methods=["POST"]) for wire in DIALECTS),
            Route("/v1/models", self._models, methods=["GET"]),
            Route(otlp_receiver.PATH, self._traces, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/{path:path}", _no_such_api, methods=["GET", "POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={Exception: _internal_error})
        config = uvicorn.Config(
            app,
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
        if session is not None:
            self._spans.close(session.root)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        if self._session(request) is None:
            return _error("unknown API key", 401)
        models = [{"id": m, "object": "model", "created": 0, "owned_by": "lightning"} for m in self._backend.models]
        return JSONResponse({"object": "list", "data": models})

    async def _traces(self, request: Request) -> Response:
        session = self._session(request)
        return await self._spans.receive(request, None if session is None else session.root)

    def _session(self, request: Request) -> Session | None:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(bearer.strip()) if scheme.lower() == "bearer" else None
        return session or self._sessions.get(request.headers.get("x-api-key", ""))

    async def _ask(self, wire: Dialect, request: Request) -> Response:
        """Answer a request in the wire format that it came in."""
        session = self._session(request)
        if session is None:
            return _error(
                "unknown API key: expected the key of a live rollout, or that of a served model", 401, wire=wire
            )
        address = Address.from_headers(request.headers)
        if address is None or address.rollout != session.root.rollout:
            # A process of its own knows its key and perhaps its name but not its place; a traceparent may be its own tracing's.
            root = session.root.to_headers()
            address = Address.from_headers({**root, **request.headers, "traceparent": root["traceparent"]})
            assert address is not None
        task = asyncio.current_task()
        assert task is not None
        session.tasks.add(task)
        try:
            body = await request.json()
            # A configured model takes the place of the one that the agent names, here and upstream.
            body = _with_model(body, session.routing, address.agent)
            model = self._route(wire, session.routing, address.agent, body["model"], request)
            try:
                # What somebody else's model can do is for them to say.
                parsed = wire.parse_request(body, said=session.said, check=not isinstance(model, Target))
            except (AttributeError, TypeError) as error:  # a string where an object belongs, and the like
                raise PolicyRequestError(f"this is no request to {wire.PATH}: {describe(error)}") from error
            if isinstance(model, Target):
                return await self._pass_on(wire, session, address, parsed, model)
            return await self._sample(wire, session, address, parsed, model, request)
        except PolicyRequestError as error:
            return _error(str(error), error.status, error.param, wire=wire)
        except json.JSONDecodeError as error:
            return _error(f"the request body is not JSON: {error}", 400, wire=wire)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is an infrastructure failure of this rollout
            count_failure(address, error)
            return _error(describe(error), 502 if isinstance(error, UpstreamError) else 500, wire=wire)
        finally:
            session.tasks.discard(task)

    def _route(self, wire: Dialect, routing: Routing, agent: str | None, requested: str, http: Request) -> str | Target:
        if agent is not None and agent in routing.trained:
            return POLICY
        if requested in self._backend.models:
            return requested
        passed = {name: http.headers[name] for name in wire.PASSED_HEADERS if name in http.headers}
        if self._upstream is not None:
            return with_headers(self._upstream.target(wire.PATH, wire.KEY_HEADER), passed)
        origin = http.headers.get(ORIGIN)
        if origin:
            return with_headers(origin_target(origin, http.headers.get(ORIGIN_AUTHORIZATION)), passed)
        raise PolicyRequestError(
            f"agent {agent!r} is not trained and asks for model {requested!r}, which is not served here; served are "
            f"{list(self._backend.models)!r}. Train the agent, give it a model under agents.frozen, or set policy.upstream",
            status=404,
            param="model",
        )

    async def _sample(
        self, wire: Dialect, session: Session, address: Address, request: ChatRequest, model: str, http: Request
    ) -> Response:
        """Answer from the backend: render once, sample n responses, record each."""
        spans = [CallSpan(address, request, model) for _ in range(request.n)]
        try:
            demands = request.demands.in_words()
            prompt = self._chat.render(request.messages, request.tools, session.memory, demands=demands)
            trained = address.agent is not None and address.agent in session.routing.trained
            params = self._sampler.params(session, request, prompt, trained=trained)
        except BaseException as error:
            abandon(spans, error)
            raise
        job = SamplingJob(session, address, request, model, prompt, params)
        reply = Reply(
            request=request,
            call=spans[0].id,
            model=model,
            prompt_ids=prompt.ids,
            decode=self._chat.text,
        )
        if request.stream:
            events = self._sampler.stream(job, spans, wire.stream_writer(reply))
            return _stream(wire, session, address, spans, events)
        try:
            choices = await _unless_disconnected(
                asyncio.gather(*(self._sampler.respond(job, span, i) for i, span in enumerate(spans))), http
            )
        except BaseException as error:
            abandon(spans, error)
            raise
        return JSONResponse(wire.write_answer(reply, choices))

    async def _pass_on(
        self, wire: Dialect, session: Session, address: Address, request: ChatRequest, target: Target
    ) -> Response:
        """Let somebody else's model answer, and record what it said."""
        spans = [CallSpan(address, request, request.model) for _ in range(request.n)]
        if request.stream:
            return _stream(wire, session, address, spans, self._pass_on_stream(wire, spans, request.body, target))
        try:
            body = await self._forward.complete(target, request.body)
            _record(spans, wire.read_answer(body), target)
        except BaseException as error:
            abandon(spans, error)
            raise
        return JSONResponse(body)

    async def _pass_on_stream(
        self, wire: Dialect, spans: list[CallSpan], body: Mapping[str, Any], target: Target
    ) -> AsyncGenerator[bytes]:
        """The events as they come. The answer is recorded before the last of them, after which a client may hang up."""
        reader = wire.stream_reader()
        recorded = False
        async for event, data in self._forward.stream(target, body):
            if data is not None:
                reader.read(data)
            if not recorded and (reader.over or (data is None and b"[DONE]" in event)):
                _record(spans, reader.answers(), target)
                recorded = True
            yield event
        if not recorded:
            _record(spans, reader.answers(), target)


def _record(spans: list[CallSpan], answers: list[Answer], target: Target) -> None:
    """Note what somebody else's server answered. Raises `UpstreamError` if that is not what was asked for."""
    if len(answers) != len(spans):
        raise UpstreamError(
            f"{target.url} gave {len(answers)} complete answers that can be recorded; expected {len(spans)}"
        )
    for span, answer in zip(spans, answers, strict=True):
        span.forwarded(answer)
        span.end()


def _with_model(body: Any, routing: Routing, agent: str | None) -> dict[str, Any]:
    requested = model_name(body)
    return {**body, "model": routing.frozen.get(agent or "", requested)}


def _stream(
    wire: Dialect, session: Session, address: Address, spans: list[CallSpan], events: AsyncGenerator[bytes]
) -> Response:
    """A response of ``events``, whose sending counts as work of the session until it is over."""

    async def send() -> AsyncGenerator[bytes]:
        task = asyncio.current_task()
        assert task is not None
        session.tasks.add(task)
        try:
            async for event in events:
                yield event
        except Exception as error:  # noqa: BLE001 - headers are sent; the client hears of it in the stream
            count_failure(address, error)
            abandon(spans, error)
            yield wire.error_event(describe(error))
        finally:
            await events.aclose()
            abandon(spans, ClientDisconnect())
            session.tasks.discard(task)

    return StreamingResponse(send(), media_type="text/event-stream")


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
    spoken = ", ".join(f"/v1{wire.PATH}" for wire in DIALECTS)
    return _error(
        f"the policy endpoint speaks POST {spoken} and GET /v1/models; found {request.method} {request.url.path}. "
        "Set the agent's client to one of these, or leave this provider out of rollouts.redirect_hosts",
        404,
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    logger.error("the policy endpoint failed", exc_info=error)
    return _error(describe(error), 500)


def _error(message: str, status: int, param: str | None = None, *, wire: Dialect = DIALECTS[0]) -> Response:
    return JSONResponse(wire.error_body(message, status=status, param=param), status_code=status)
