"""An HTTP server that answers model calls, in every wire format, with recorded responses."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_core.capture.span_ids import new_span_id
from lightning_core.chat.json_text import show_json
from lightning_core.chat.messages import Message
from lightning_core.config import Config
from lightning_core.config.sections import UpstreamSection
from lightning_core.dialects import DIALECTS, chat_completions, completions, gemini
from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.exchange import ChatRequest, Choice, ResponseContext, ResponseCounts
from lightning_core.endpoint.event_stream import EventStream, write_events
from lightning_core.endpoint.limits import Limits
from lightning_core.endpoint.listening import ServerThread, listen
from lightning_core.endpoint.receive import read_json
from lightning_core.endpoint.refusals import error_response
from lightning_core.errors import PolicyRequestError, fold, plural
from lightning_core.tools.replay.responses import RecordedResponse, ResponsePool

_MISSING = 410
"""The status for a request without a recorded response. Clients do not repeat it, and it is no failure of the agent."""
_STREAMS_WITHOUT_COUNTS = tuple(dialect.PATH for dialect in (chat_completions, completions, gemini))
_FINISH_REASONS = ("stop", "length", "tool_calls")
_MOST_CONVERSATIONS = 10_000
_SHOWN_CHARACTERS = 60


class _ReplayServer:
    """Answers requests with ``responses``, each after the time that it took when it was recorded."""

    def __init__(self, responses: ResponsePool) -> None:
        self._responses = responses
        self._conversations: OrderedDict[str, Sequence[Message]] = OrderedDict()
        """The messages up to the newest responses, by id, for requests that name the previous response."""

    def app(self) -> Starlette:
        """The server's routes."""
        google = [
            Route(f"/v1/{{name:path}}:{method}", self._handler(gemini, stream=stream), methods=["POST"])
            for method, stream in ((gemini.METHODS[0], False), (gemini.STREAM, True))
        ]
        others = [Route(f"/v1{dialect.PATH}", self._handler(dialect), methods=["POST"]) for dialect in DIALECTS]
        return Starlette(routes=[*google, *others, Route("/{path:path}", self._refuse, methods=["GET", "POST"])])

    def _handler(self, dialect: Dialect, *, stream: bool | None = None) -> Callable[[Request], Awaitable[Response]]:
        """Answers requests of ``dialect``. ``stream``: for the format that says it in the URL."""

        async def handle(request: Request) -> Response:
            try:
                body = read_json(await request.body())
                if stream is not None:
                    body = gemini.with_url(body, request.url.path, stream=stream)
                return await self._answer(dialect, body)
            except PolicyRequestError as error:
                return error_response(dialect, error)

        return handle

    async def _refuse(self, request: Request) -> Response:
        message = f"{request.method} {request.url.path} is not recorded: only model calls are, without embeddings"
        return JSONResponse({"error": {"message": message}}, _MISSING)

    async def _answer(self, dialect: Dialect, body: Mapping[str, Any]) -> Response:
        request = dialect.read_request(body, conversations=self._conversations)
        if _wants_logprobs(body):
            raise PolicyRequestError(
                f"{request.model!r} is asked for logprobs, which are not recorded", status=_MISSING
            )
        found = self._responses.take(request.model, [request.input_messages(i) for i in range(request.choices)])
        if found is None:
            raise PolicyRequestError(_describe_missing(request, self._responses), status=_MISSING)
        await asyncio.sleep(max(response.seconds for response in found))
        return self._write(dialect, request, found)

    def _write(self, dialect: Dialect, request: ChatRequest, found: Sequence[RecordedResponse]) -> Response:
        choices = [
            Choice(message=dict(r.message), token_ids=[], logprobs=[], finish_reason=_finish_reason(r)) for r in found
        ]
        counts = _counts(found)
        if counts is None:
            request = replace(request, body={k: v for k, v in request.body.items() if k != "stream_options"})
            self._responses.streams_of_0_tokens += request.stream and dialect.PATH not in _STREAMS_WITHOUT_COUNTS
        context = ResponseContext(
            request=request,
            call=new_span_id(),
            model=found[0].model,
            prompts=[()],
            bytes_of=_nothing,
            answered=bool,
            known_counts=counts or ResponseCounts(input=0, output=0),
        )
        if len(found) == 1:
            self._keep(context.call, request, found[0].message)
        if request.stream:
            return EventStream(write_events(dialect.stream_writer(context), choices))
        body = dialect.write_response(context, choices)
        if counts is None:
            for name in ("usage", "usageMetadata"):
                body.pop(name, None)
        return JSONResponse(body)

    def _keep(self, call: str, request: ChatRequest, message: Message) -> None:
        # The next request has its own instructions.
        messages = request.messages[1:] if request.body.get("instructions") else request.messages
        self._conversations[call] = (*messages, message)
        if len(self._conversations) > _MOST_CONVERSATIONS:
            self._conversations.popitem(last=False)


@contextmanager
def replaying(config: Config, responses: ResponsePool) -> Generator[Config]:
    """Serve ``responses`` on a free port of this machine; yields ``config`` with that as its upstream. Raises `InfrastructureError`."""
    listening, url = listen("127.0.0.1", 0, None)

    def serve() -> None:
        with server.runner() as runner:
            runner.run(server.serve())

    server = ServerThread(
        _ReplayServer(responses).app(),
        listening,
        serve,
        name="lightning-replay",
        tls=None,
        limits=Limits(),
        ending_seconds=1,
    )
    seconds = UpstreamSection.model_fields["timeout_seconds"].default + responses.longest_seconds
    upstream = UpstreamSection(base_url=url, timeout_seconds=seconds)
    try:
        server.start(f"the server of recorded responses did not start at {url}")
        yield config.model_copy(update={"policy": config.policy.model_copy(update={"upstream": upstream})})
    finally:
        server.stop()


def _counts(found: Sequence[RecordedResponse]) -> ResponseCounts | None:
    """The counts of all choices; None if one is not known."""
    read, written = [r.input_tokens for r in found], [r.output_tokens for r in found]
    if None in read or None in written:
        return None
    return ResponseCounts(
        input=sum(n or 0 for n in read),
        output=sum(n or 0 for n in written),
        cached=sum(r.cached_tokens for r in found),
    )


def _finish_reason(response: RecordedResponse) -> str:
    if response.message.get("tool_calls") and response.finish_reason != "length":
        return "tool_calls"
    return response.finish_reason if response.finish_reason in _FINISH_REASONS else "stop"


def _wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether a request of any wire format asks for logprobs."""
    config = body.get("generationConfig")
    return (
        body.get("logprobs") not in (None, False)
        or any("logprobs" in str(name) for name in body.get("include") or ())
        or bool(isinstance(config, Mapping) and config.get("responseLogprobs"))  # pyright: ignore[reportUnknownMemberType]
    )


def _describe_missing(request: ChatRequest, responses: ResponsePool) -> str:
    messages = request.input_messages(0)
    last: Mapping[str, Any] = messages[-1] if messages else {}
    what = f"no response of {request.model!r} to this request is recorded"
    if not responses.models[request.model]:
        what = f"no response of {request.model!r} is recorded"
    shown = show_json(fold(str(last.get("content") or ""), _SHOWN_CHARACTERS))
    return f"{what} ({plural(len(messages), 'message')}, the last one of the role {last.get('role')}: {shown})"


def _nothing(token: int) -> None:
    """There are no tokens."""
