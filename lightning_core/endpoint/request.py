"""The lifecycle of one request: admit, parse, answer, clean up.

If the client disconnects, the rollout closes or an error is raised, sampling is aborted and the spans are ended before the request ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lightning_core.capture import find_rollout
from lightning_core.capture.address import Address
from lightning_core.dialects.dialect import Dialect
from lightning_core.endpoint.agents.signed_origin import trusted_headers
from lightning_core.endpoint.record import ModelSpan
from lightning_core.endpoint.refusals import (
    address_of,
    count_failure,
    credentials,
    error_response,
    record_refusal,
    refuse_unknown_key,
    status_of,
)
from lightning_core.endpoint.sessions import UNKNOWN_KEY, RequestKey, Session, Sessions, abort
from lightning_core.endpoint.transport.event_stream import EventStream, disconnected
from lightning_core.endpoint.transport.large_work import UNKNOWN, T
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.transport.receive import check_strings, check_values, plain_body, read_body, read_json
from lightning_core.errors import (
    HostedToolError,
    OverloadError,
    PolicyRequestError,
    UpstreamError,
    UpstreamRefusal,
    UpstreamStreamError,
    describe,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class IncomingRequest:
    """A request that was admitted and whose body was read."""

    session: Session
    address: Address
    headers: Mapping[str, str]
    body: Any
    data: bytes = field(repr=False)
    """The body as it arrived."""
    digest: bytes
    """The hash of ``data`` in this process, which finds retries."""
    size: int
    """The number of bytes of the body when decompressed."""
    operation: str
    """The operation of its span if it is refused before it opens one."""
    path: str
    spans: list[ModelSpan] = field(default_factory=list[ModelSpan])
    """Its spans. Those still open when the request ends are ended as failed."""
    retried: list[tuple[RequestKey, str]] = field(init=False)
    """The failures that this request may be a retry of."""
    opened: bool = False
    """Whether it counts as one of the model calls of its rollout."""
    _sender: str | None = field(init=False)
    """The agent as the request names it."""

    def __post_init__(self) -> None:
        self._sender = self.address.agent
        failed = self.session.failed
        unread = (self._sender, self.path, b"")
        self.retried = [(self._key, failure) for failure in failed.get(self._key, ())] if failed else []
        # It may be the retry of one request whose body was not read.
        self.retried += [(unread, failure) for failure in failed.get(unread, ())[:1]]

    @property
    def _key(self) -> RequestKey:
        return self._sender, self.path, self.digest

    async def off_loop(self, work: Callable[[], T], *, size: int | None = None, compiles: bool = False) -> T:
        """The result of ``work`` on the body, or on ``size`` bytes; see `LargeWork.run`."""
        size = self.size if size is None else size
        return await self.session.large_work.run(self.session.root.rollout, size, work, compiles=compiles)

    def open_call(self) -> None:
        """Count a model call of the rollout. Raises `CallLimitError` if it has made all that it may."""
        self.opened = self.session.open_call(self.address.agent)

    def close_call(self) -> None:
        """Undo `open_call`: the request has no response, for a reason outside the agent."""
        self.session.calls -= self.opened
        self.opened = False

    def fail(self, error: Exception) -> None:
        """Count an infrastructure failure, which a retry of the client may recover, in place of a model call."""
        self.close_call()
        count_failure(self.session, self._key, error)

    def recover(self) -> None:
        """Forget the failures that this request was a retry of: it is answered."""
        run = find_rollout(self.session.root.rollout)
        for key, failure in self.retried:
            left = self.session.failed.get(key, [])
            if run is not None and failure in left:
                left.remove(failure)
                run.recover(failure)

    def refuse(self, error: PolicyRequestError) -> None:
        """End the open spans as refused; without any, record one."""
        if not self.spans:
            record_refusal(self.session, self.address, self.operation, self.path, self.body, error)
        self.abandon(error)
        if isinstance(error, HostedToolError):
            self.fail(error)

    def abandon(self, error: BaseException) -> None:
        """End the open spans as failed."""
        for span in self.spans:
            span.abandon(error)


class RequestHandler:
    """An ASGI app for one path, in the wire format ``dialect``."""

    def __init__(
        self,
        dialect: Dialect,
        respond: Callable[[IncomingRequest], Awaitable[Response]],
        sessions: Sessions,
        limits: Limits,
        *,
        operation: str = "chat",
        complete: Callable[[Any, Request], Any] = lambda body, request: body,
    ) -> None:
        """``operation``: of the span of a request that is refused before it opens another one.

        ``complete``: adds to the body what a wire format has in the URL.
        """
        self._dialect = dialect
        self._respond = respond
        self._sessions = sessions
        self._limits = limits
        self._operation = operation
        self._complete = complete

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Errors of clients, models and servers become responses."""
        request = Request(scope, receive)
        session = self._sessions.find(credentials(request))
        if session is None:
            error = refuse_unknown_key(request, self._sessions, self._operation)
            await error_response(self._dialect, error)(scope, receive, send)
            return
        address = address_of(request.headers, session)
        incoming: IncomingRequest | None = None
        try:
            with self._sessions.admit(session):
                data = await read_body(request, most_bytes=self._limits.body_bytes, seconds=self._limits.body_seconds)
                # A compressed body may be of any size.
                most = max(len(data), UNKNOWN if "content-encoding" in request.headers else 0)
                parse = partial(self._parse, data, request)
                body, size, digest = await session.large_work.run(session.root.rollout, most, parse)
                incoming = IncomingRequest(
                    session=session,
                    address=address,
                    headers=trusted_headers(request.headers, session),
                    body=body,
                    data=data,
                    digest=digest,
                    size=size,
                    operation=self._operation,
                    path=scope["path"],
                )
                if session.closed:
                    raise PolicyRequestError(UNKNOWN_KEY, status=401)
                await self._run(incoming, scope, receive, send)
        except PolicyRequestError as error:
            if incoming is None:
                record_refusal(session, address, self._operation, scope["path"], None, error)
                if status_of(error) is not None:
                    count_failure(session, (address.agent, scope["path"], b""), error)
            await error_response(self._dialect, error)(scope, receive, send)
        except OverloadError as error:
            count_failure(session, (address.agent, scope["path"], b""), error)
            record_refusal(session, address, self._operation, scope["path"], None, error)
            await error_response(self._dialect, PolicyRequestError(str(error), status=429))(scope, receive, send)
        except ClientDisconnect:
            pass

    def _parse(self, data: bytes, request: Request) -> tuple[Any, int, bytes]:
        """The body, its size when decompressed, and the hash of ``data``."""
        plain = plain_body(data, request.headers.get("content-encoding", ""), most_bytes=self._limits.body_bytes)
        check_strings(plain, self._limits.strings)
        check_values(plain, self._limits.values)
        body = self._complete(read_json(plain), request)
        return body, len(plain), hash(data).to_bytes(8, "little", signed=True)

    async def _run(self, incoming: IncomingRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``incoming`` until it is answered, its client disconnects, or its rollout closes."""
        started = False

        async def tracking_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        work = asyncio.create_task(self._answer(incoming, scope, receive, tracking_send))
        disconnect = asyncio.create_task(disconnected(receive))
        incoming.session.work.add(work)
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = disconnect.done() and not work.done()
            disconnect.cancel()
            if not work.done():
                await abort(work, "the client closed the connection" if left else "the endpoint is shutting down")
                if not started:
                    incoming.close_call()  # its client did not wait for the response
            incoming.session.work.discard(work)
        if not work.cancelled():
            work.result()
        elif not left and not started:
            raise PolicyRequestError(UNKNOWN_KEY, status=401)
        elif not left:
            end = self._dialect.error_event("the rollout has ended")
            await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _answer(self, incoming: IncomingRequest, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                response = await self._respond(incoming)
                if response.status_code < 400:
                    incoming.recover()
            except PolicyRequestError as error:
                incoming.refuse(error)
                response = error_response(self._dialect, error)
            except Exception as error:  # noqa: BLE001 - any error of a backend is an infrastructure failure
                response = self._failed(incoming, error)
            if isinstance(response, EventStream):
                response.on_error = lambda error: self._stream_failed(incoming, error)
            await response(scope, receive, send)
        except BaseException as error:
            incoming.abandon(error)
            raise

    def _failed(self, incoming: IncomingRequest, error: Exception) -> Response:
        incoming.abandon(error)
        of_request = isinstance(error, (UpstreamRefusal, UpstreamStreamError)) and error.is_request_error
        if not of_request:
            incoming.fail(error)
        if isinstance(error, UpstreamRefusal):
            return Response(error.body, error.status, error.headers)
        status = 400 if of_request else 502 if isinstance(error, UpstreamError) else 500
        return error_response(self._dialect, PolicyRequestError(describe(error), status=status))

    def _stream_failed(self, incoming: IncomingRequest, error: Exception) -> bytes:
        """The event that reports ``error``: the headers are already sent."""
        incoming.abandon(error)
        if isinstance(error, UpstreamStreamError):
            if not error.is_request_error:
                incoming.fail(error)
            return error.event
        if isinstance(error, PolicyRequestError):
            return self._dialect.error_event(str(error))
        incoming.fail(error)
        return self._dialect.error_event(describe(error))
