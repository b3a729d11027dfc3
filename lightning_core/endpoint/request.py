"""One request from its arrival to its end: admitted, read, answered; and when it is over, nothing of it is left.

Whatever ends it early, the client that hangs up, the rollout that closes, an error: what was still being sampled for it is aborted, and its
spans are closed, before this says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from lightning_core.capture import find_run
from lightning_core.endpoint.dialects.dialect import Dialect
from lightning_core.endpoint.limits import Limits
from lightning_core.endpoint.receive import read_body, read_json
from lightning_core.endpoint.record import ModelSpan
from lightning_core.endpoint.sessions import UNKNOWN_KEY, Session, Sessions, abort
from lightning_core.errors import OverloadError, PolicyRequestError, UpstreamError, UpstreamRefusal
from lightning_core.trace import Address, describe

logger = logging.getLogger(__name__)

_MOST_SAID = 2000
"""Characters of an error message; what was found wrong may be as long as the body."""


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request that was admitted and read."""

    session: Session
    address: Address
    headers: Mapping[str, str]
    body: Any
    size: int
    """Bytes of the body."""
    spans: list[ModelSpan] = field(default_factory=list[ModelSpan])
    """What it is recorded in; those still open when it is over are closed as failed."""

    def abandon(self, error: BaseException) -> None:
        """Close the spans that are still open."""
        for span in self.spans:
            span.abandon(error)


class Service:
    """An ASGI app for one path: requests and errors are in the format of ``wire``, answers are made by ``answer``."""

    def __init__(
        self, wire: Dialect, answer: Callable[[Asked], Awaitable[Response]], sessions: Sessions, limits: Limits
    ) -> None:
        self._wire = wire
        self._answer = answer
        self._sessions = sessions
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Never raises for anything that a client or a model does."""
        request = Request(scope, receive)
        session = self._sessions.find(request.headers)
        try:
            if session is None:
                raise PolicyRequestError(UNKNOWN_KEY, status=401)
            address = _address(request.headers, session)
            with self._sessions.admit(session):
                data = await read_body(request, most_bytes=self._limits.body_bytes, seconds=self._limits.body_seconds)
                asked = Asked(
                    session=session, address=address, headers=request.headers, body=read_json(data), size=len(data)
                )
                if session.closed:
                    raise PolicyRequestError(UNKNOWN_KEY, status=401)
                await self._see_through(asked, scope, receive, send)
        except PolicyRequestError as error:
            await error_response(self._wire, error)(scope, receive, send)
        except OverloadError as error:
            assert session is not None
            count_failure(session.root, error)
            await error_response(self._wire, PolicyRequestError(str(error), status=429))(scope, receive, send)
        except ClientDisconnect:
            pass

    async def _see_through(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``asked``, until it is answered, its client hangs up, or its rollout closes."""
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        work = asyncio.create_task(self._respond(asked, scope, receive, noting_send))
        hang_up = asyncio.create_task(_hang_up(receive))
        asked.session.work.add(work)
        try:
            await asyncio.wait({work, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = hang_up.done() and not work.done()
            hang_up.cancel()
            if not work.done():
                await abort(work, "the client closed the connection" if left else "the endpoint is shutting down")
            asked.session.work.discard(work)
        if not work.cancelled():
            work.result()
        elif not left and not started:
            raise PolicyRequestError(UNKNOWN_KEY, status=401)
        elif not left:
            end = self._wire.error_event("the rollout has ended")
            await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _respond(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                response = await self._answer(asked)
            except PolicyRequestError as error:
                asked.abandon(error)
                response = error_response(self._wire, error)
            except Exception as error:  # noqa: BLE001 - whatever a backend raises is an infrastructure failure of this rollout
                response = self._failed(asked, error)
            if isinstance(response, EventStream):
                response.on_error = lambda error: self._broken_off(asked, error)
            await response(scope, receive, send)
        except BaseException as error:
            asked.abandon(error)
            raise

    def _failed(self, asked: Asked, error: Exception) -> Response:
        asked.abandon(error)
        if isinstance(error, UpstreamRefusal):
            if not error.is_request_error:
                count_failure(asked.address, error)
            return Response(error.body, error.status, error.headers)
        count_failure(asked.address, error)
        status = 502 if isinstance(error, UpstreamError) else 500
        return error_response(self._wire, PolicyRequestError(describe(error), status=status))

    def _broken_off(self, asked: Asked, error: Exception) -> bytes:
        """Headers are sent; the client hears of it in the stream."""
        asked.abandon(error)
        if not isinstance(error, PolicyRequestError):
            count_failure(asked.address, error)
        return self._wire.error_event(describe(error))


class EventStream(Response):
    """Server-sent events, as they come; the generator is closed before the response is over, however that comes about."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self.on_error: Callable[[Exception], bytes] = lambda error: b""
        """What to say last when there is an error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = b""
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:  # noqa: BLE001 - whatever a backend raises
                last = self.on_error(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _address(headers: Mapping[str, str], session: Session) -> Address:
    """Who asks: as the request says, but never outside its key's rollout."""
    address = Address.from_headers(headers)
    if address is not None and address.rollout == session.root.rollout:
        return address
    # A process of its own knows its key and perhaps its name but not its place; a traceparent may be its own tracing's.
    root = session.root.to_headers()
    address = Address.from_headers({**root, **headers, "traceparent": root["traceparent"]})
    assert address is not None
    return address


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response(wire: Dialect, error: PolicyRequestError) -> Response:
    """``error`` as the clients of ``wire`` expect it."""
    message, param = _clip(str(error)), None if error.param is None else _clip(error.param)
    headers: dict[str, str] = {}
    if error.status == 429:
        headers["retry-after"] = "1"
    if error.status == 408:
        headers["connection"] = "close"  # the rest of the body may still come, and is nobody's request
    return JSONResponse(wire.error_body(message, status=error.status, param=param), error.status, headers)


def _clip(text: str) -> str:
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]} … ({len(text)} characters)"


def count_failure(address: Address, error: Exception) -> None:
    """Blame the machinery, on the rollout that the call belonged to."""
    logger.warning("a model call of agent %r failed: %s", address.agent, describe(error))
    run = find_run(address.rollout)
    if run is not None:
        run.count_infrastructure_failure(describe(error))
