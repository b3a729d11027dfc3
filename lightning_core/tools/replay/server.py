"""An HTTP server that answers model calls, in every wire format, with recorded responses."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from lightning_core.capture.address import Address
from lightning_core.capture.span_ids import new_span_id
from lightning_core.chat.history.message_key import plain_text
from lightning_core.chat.json_text import show_json
from lightning_core.config import Config
from lightning_core.config.sections import UpstreamSection
from lightning_core.dialects import DIALECTS, chat_completions, gemini, messages, responses
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.exchange import ChatRequest, ResponseCounts
from lightning_core.endpoint.forwarding.known_response import known_choice, write_known
from lightning_core.endpoint.refusals import error_response
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.transport.listening import ServerThread, listen
from lightning_core.endpoint.transport.receive import read_body, read_json
from lightning_core.errors import PolicyRequestError, fold, plural
from lightning_core.tools.replay.responses import RecordedResponse, ResponsePool, conversation_key
from lightning_core.tools.serving import RecentResponses

_MISSING = 501
"""The status for a request without a recorded response: a failure outside the agent, also for requests that sample nothing."""
_NO_RETRY = {"x-should-retry": "false"}
"""For the SDKs of OpenAI and Anthropic."""
_WITH_USAGE = (responses.PATH, messages.PATH)
"""The formats without a response that has no token counts."""
_SHOWN_CHARACTERS = 60
_KEEP_ALIVE = b": waiting\n\n"
"""A comment between server-sent events."""
_KEEP_ALIVE_SECONDS = 0.5


class _ReplayServer:
    """Answers requests with ``pool``, each after the time that it took when it was recorded."""

    def __init__(self, pool: ResponsePool) -> None:
        self._pool = pool
        self._limits = Limits()
        self.ending = asyncio.Event()
        """Ends all waits: the evaluation is over."""
        self._conversations = RecentResponses()
        """The messages up to recent responses, for requests that name the previous response."""

    def app(self, prefix: str) -> Starlette:
        """The server's routes, below the path ``prefix``."""
        google = [
            Route(f"/{{name:path}}:{method}", self._responder(gemini, stream=stream), methods=["POST"])
            for method, stream in ((gemini.METHODS[0], False), (gemini.STREAM, True))
        ]
        others = [Route(dialect.PATH, self._responder(dialect), methods=["POST"]) for dialect in DIALECTS]
        reject = Route("/{path:path}", self._reject_path, methods=["GET", "POST"])
        return Starlette(routes=[Mount(prefix, routes=[*google, *others, reject])])

    def _responder(self, dialect: Dialect, *, stream: bool | None = None) -> Callable[[Request], Awaitable[Response]]:
        """Responds to requests of ``dialect``. ``stream``: set for the format that has it in the URL."""

        async def respond(request: Request) -> Response:
            try:
                limits = self._limits
                data = await read_body(request, most_bytes=limits.body_bytes, seconds=limits.body_seconds)
                began = time.monotonic()
                body = read_json(data)
                if stream is not None:
                    body = gemini.with_url(body, request.url.path, stream=stream)
                rollout = Address.from_headers(request.headers)
                return await self._respond(dialect, body, began, None if rollout is None else rollout.rollout)
            except PolicyRequestError as error:
                return _refuse(dialect, error)
            except ClientDisconnect:
                return Response(status_code=400)

        return respond

    async def _reject_path(self, request: Request) -> Response:
        path = request.path_params["path"]
        message = f"{request.method} /{path} cannot be answered from recorded responses; expected a model call"
        return _refuse(chat_completions, PolicyRequestError(message, status=_MISSING))

    async def _respond(self, dialect: Dialect, body: Mapping[str, Any], began: float, rollout: str | None) -> Response:
        request, keys = await asyncio.to_thread(self._read, dialect, body)
        found = self._pool.take(request.model, keys, rollout)
        if found is None:
            raise PolicyRequestError(_describe_missing(request, self._pool), status=_MISSING)
        until = began + max(response.seconds for response in found)
        refusal = next((response.refusal for response in found if response.refusal is not None), None)
        if refusal is None and request.stream and dialect.PATH != gemini.PATH:  # Google's client reads no comments
            return self._write(dialect, request, found, until)
        async for _ in self._wait(until):
            pass
        if refusal is not None:
            status, message = refusal
            raise PolicyRequestError(message, status=status)
        return self._write(dialect, request, found, until)

    async def _wait(self, until: float) -> AsyncGenerator[bytes]:
        """Wait until this time, by the monotonic clock. Events that keep the connection of a stream in use: clients wait for any bytes."""
        while (left := until - time.monotonic()) > 0 and not self.ending.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), min(left, _KEEP_ALIVE_SECONDS))
            yield _KEEP_ALIVE

    def _read(self, dialect: Dialect, body: Mapping[str, Any]) -> tuple[ChatRequest, list[bytes]]:
        """The request in ``body``, and the conversation of each of its responses."""
        request = dialect.read_request(body, conversations=self._conversations)
        previous = body.get("previous_response_id")
        if previous is not None and str(previous).removeprefix("resp_") not in self._conversations:
            raise PolicyRequestError(
                f"previous_response_id is {show_json(previous)}, which is not the id of a response that was answered here before",
                status=_MISSING,
            )
        if field := _tokens_wanted(body):
            raise PolicyRequestError(f"the request sets {field}, but no tokens are recorded; unset it", status=_MISSING)
        return request, [conversation_key(request.input_messages(i)) for i in range(request.choices)]

    def _write(
        self, dialect: Dialect, request: ChatRequest, found: Sequence[RecordedResponse], until: float
    ) -> Response:
        counts, call = _counts(found), new_span_id()
        self._pool.uncounted += counts is None and dialect.PATH in _WITH_USAGE
        if request.history is not None:
            self._conversations[call] = (*request.history, found[0].message)
        return write_known(
            dialect,
            request,
            [known_choice(response.message, response.finish_reason) for response in found],
            call=call,
            model=found[0].model,
            counts=counts,
            reports_usage=counts is not None,
            before=self._wait(until),
        )


@contextmanager
def replaying(config: Config, pool: ResponsePool) -> Generator[Config]:
    """Answer with ``pool`` on a free port of this machine; yields ``config`` with that server as its upstream.

    A failed request is not repeated: it would fail again. Raises `ConfigError` or `InfrastructureError` if the server does not start.
    """
    listening, url = listen("127.0.0.1", 0, None)
    prefix = f"/{secrets.token_hex(8)}/v1"  # other users of this machine do not know it
    base_url = url.removesuffix("/v1") + prefix

    def serve() -> None:
        with server.runner() as runner:
            runner.run(server.serve())

    replay = _ReplayServer(pool)
    server = ServerThread(
        replay.app(prefix),
        listening,
        serve,
        name="lightning-replay",
        tls=None,
        limits=Limits(),
        ending_seconds=1,
    )
    defaults = UpstreamSection(base_url=base_url)
    upstream = UpstreamSection(
        base_url=base_url,
        connections=max(defaults.connections, Limits().requests, 4 * config.rollouts.concurrency),
        timeout_seconds=defaults.timeout_seconds + pool.longest_seconds,
    )
    policy = config.policy.model_copy(update={"upstream": upstream})
    rollouts = config.rollouts.model_copy(update={"retries": 0})
    try:
        server.start(f"the server of recorded responses did not start at {url}")
        yield config.model_copy(update={"policy": policy, "rollouts": rollouts})
    finally:
        if server.is_serving:
            server.loop.call_soon_threadsafe(replay.ending.set)
        server.stop()


def _refuse(dialect: Dialect, error: PolicyRequestError) -> Response:
    response = error_response(dialect, error)
    response.headers.update(_NO_RETRY)
    return response


def _counts(found: Sequence[RecordedResponse]) -> ResponseCounts | None:
    """The counts of all choices; None if one is not known."""
    known = [(r.input_tokens, r.output_tokens) for r in found]
    if any(None in pair for pair in known):
        return None
    read, written = (sum(number or 0 for number in column) for column in zip(*known, strict=True))
    return ResponseCounts(input=read, output=written, cached=sum(r.cached_tokens for r in found))


def _tokens_wanted(body: Mapping[str, Any]) -> str | None:
    """The field by which a request of any wire format asks for tokens or their logprobs; None without."""
    logprobs: Any = body.get("logprobs")
    if logprobs is not None and logprobs is not False:
        return "logprobs"
    if body.get("return_token_ids"):
        return "return_token_ids"
    config: Any = body.get("generationConfig") or body.get("generation_config")
    if isinstance(config, Mapping) and (config.get("responseLogprobs") or config.get("response_logprobs")):  # pyright: ignore[reportUnknownMemberType]
        return "responseLogprobs"
    return next((str(name) for name in body.get("include") or () if "logprobs" in str(name)), None)


def _describe_missing(request: ChatRequest, pool: ResponsePool) -> str:
    shown = request.input_messages(0)
    last: Mapping[str, Any] = shown[-1] if shown else {}
    what = f"no response of {request.model!r} is recorded"
    if pool.models[request.model]:
        what = f"no response of {request.model!r} to this conversation is recorded"
    text = show_json(fold(plain_text(last), _SHOWN_CHARACTERS))
    return (
        f"{what}: {plural(len(shown), 'message')}, the last one of the role {last.get('role')}: {text}. Record this task with this "
        "version of the agent, or leave it out of tasks.eval"
    )
