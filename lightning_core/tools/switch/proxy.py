"""Sends each request to the arm of its conversation, and records the outcome."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote, unquote

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lightning_core.capture.address import AGENT_HEADER
from lightning_core.chat.json_text import show_json
from lightning_core.endpoint.agent_urls import split_path
from lightning_core.endpoint.guard import dialect_of
from lightning_core.endpoint.limits import Limits
from lightning_core.endpoint.receive import check_strings, check_values, plain_body, read_body, read_json
from lightning_core.endpoint.refusals import credentials, error_response
from lightning_core.endpoint.routing import NamedCalls
from lightning_core.endpoint.sessions import UNKNOWN_KEY, Sessions
from lightning_core.errors import COUNTED, PolicyRequestError, Repeats, UpstreamError, describe
from lightning_core.tools.record.observed import ObservedCall
from lightning_core.tools.switch.arm import Arm, dialect_of_path, requested_model
from lightning_core.tools.switch.book import ArmCall, Book, KnownCall
from lightning_core.tools.switch.meters import Meters
from lightning_core.tools.switch.plan import SwitchPlan
from lightning_core.tools.switch.recorded import SwitchTraces
from lightning_core.tools.switch.shares import Shares, conversation_of
from lightning_core.tools.switch.usage import ReadResponse, events_of, read_usage, response_id

logger = logging.getLogger(__name__)

ARM_HEADER = "lightning-arm"
"""Header of a response: the model that answered, by its name in the plan."""
CALL_HEADER = "lightning-call"
"""Header of a response: the id of the call, for feedback."""

_RECENT = 100_000
"""Responses whose feedback is accepted before they are in the file."""
_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 600.0
"""Longest time in which an arm sends nothing, as in the SDKs of OpenAI and Anthropic."""
_DISCONNECTED = "the client disconnected"
_RETRIED = (429, 529)
# Of one connection, or added again.
_NOT_RETURNED = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"})


@dataclass(slots=True, kw_only=True)
class _Sent:
    """A request on its way to an arm."""

    agent: str
    conversation: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    data: bytes = field(repr=False)


class Proxy:
    """Answers model calls from ``arms``. Runs on one event loop."""

    def __init__(
        self,
        plan: SwitchPlan,
        arms: Mapping[str, Arm],
        book: Book,
        meters: Meters,
        sessions: Sessions,
        limits: Limits,
        traces: SwitchTraces | None = None,
    ) -> None:
        self.shares = {
            name: Shares(arms=dict(agent.arms), shadow=agent.shadow, fallback=agent.fallback)
            for name, agent in plan.agents.items()
        }
        """By the keys of ``plan.agents``."""
        self._plan = plan
        self._arms = arms
        self._book = book
        self._meters = meters
        self._traces = traces
        self._sessions = sessions
        self._limits = limits
        self._named = [
            NamedCalls(name=rule.name, contains=rule.contains, model=rule.model, tools=rule.tools)
            for rule in plan.named
        ]
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
        )
        self._recent: OrderedDict[str, KnownCall] = OrderedDict()
        self._shadows: set[asyncio.Task[None]] = set()
        self._failures = Repeats()

    async def close(self) -> None:
        """Wait for the shadow requests in progress, then close the connections."""
        await asyncio.gather(*self._shadows, return_exceptions=True)
        await self._client.aclose()

    def find(self, response: str) -> KnownCall | None:
        """The recent call with this id, or whose response has it."""
        return self._recent.get(response)

    async def respond(self, request: Request) -> Response:
        """The response of an arm, as it is; or a refusal in the format of the client."""
        try:
            return await self._respond(request)
        except PolicyRequestError as error:
            return error_response(dialect_of(request), error)

    async def _respond(self, request: Request) -> Response:
        if self._sessions.find(credentials(request)) is None:
            raise PolicyRequestError(UNKNOWN_KEY, status=401)
        limits = self._limits
        data = await read_body(request, most_bytes=limits.body_bytes, seconds=limits.body_seconds)
        data = plain_body(data, request.headers.get("content-encoding", ""), most_bytes=limits.body_bytes)
        raw_path, query = request.scope["raw_path"].decode("latin-1").partition("?")[0], request.url.query
        in_url, path = split_path(raw_path)
        sent = self._read(request, in_url, path, query, data)
        rule = self._plan.rule_of(sent.agent)
        if rule is None:
            shares = Shares(arms={} if self._plan.default is None else {self._plan.default: 1.0})
        else:
            shares = self.shares[rule]
        if not shares.arms:
            raise PolicyRequestError(self._unknown(sent, in_url), status=404)
        arm = self._arms[shares.choose(sent.agent, sent.conversation)]
        if shares.shadow is not None and request.method == "POST" and dialect_of_path(path) is not None:
            self._copy(sent, self._arms[shares.shadow])
        fallback = None if shares.fallback in (None, arm.name) else self._arms[shares.fallback]
        return await self._answer(request, sent, arm, fallback)

    def _read(self, request: Request, in_url: str | None, path: str, query: str, data: bytes) -> _Sent:
        body: Mapping[str, Any] = {}
        if dialect_of_path(path) is not None:
            check_strings(data, self._limits.strings)
            check_values(data, self._limits.values)
            value = read_json(data)
            if not isinstance(value, dict):
                raise PolicyRequestError("the request body is not a JSON object")
            body = cast("Mapping[str, Any]", value)
        headers = {name.lower(): value for name, value in request.headers.items()}
        agent = in_url or unquote(headers.get(AGENT_HEADER, ""))
        if not agent and body:
            names = dict.fromkeys(rule.name for rule in self._named if rule.matches(body))
            model = requested_model(path, body)
            agent = next(iter(names), model if model in self._plan.agents else "")
        conversation = conversation_of(headers, body)
        return _Sent(
            agent=agent, conversation=conversation, path=path, query=query, headers=headers, body=body, data=data
        )

    def _unknown(self, sent: _Sent, in_url: str | None) -> str:
        listed = ", ".join(self._plan.agents) or "none"
        found = f"agent {show_json(sent.agent)}, which is not listed" if sent.agent else "no agent"
        return (
            f"the request names {found}; the agents are {listed}. Name it in the client's base URL (/a/NAME/v1), in the header "
            f"{AGENT_HEADER}, by a rule under named, or set default"
        )

    async def _answer(self, request: Request, sent: _Sent, arm: Arm, fallback: Arm | None) -> Response:
        exchange = _Exchange(self, sent, arm)
        try:
            response = await exchange.open(request.method)
        except httpx.HTTPError as error:
            exchange.fail(error)
            if fallback is not None:
                return await self._answer(request, sent, fallback, None)
            message = f"model {arm.name!r} of the switch could not be reached: {describe(error)}"
            raise PolicyRequestError(message, status=502) from None
        if fallback is not None and (response.status_code in _RETRIED or response.status_code >= 500):
            await response.aread()
            exchange.end(response.content)
            return await self._answer(request, sent, fallback, None)
        headers = {name: value for name, value in response.headers.items() if name.lower() not in _NOT_RETURNED}
        headers |= {ARM_HEADER: arm.name, CALL_HEADER: exchange.id}
        if exchange.is_stream:
            return StreamingResponse(exchange.parts(), status_code=response.status_code, headers=headers)
        try:
            data = await response.aread()
        except httpx.HTTPError as error:
            exchange.fail(error)
            message = f"model {arm.name!r} of the switch ended its response early: {describe(error)}"
            raise PolicyRequestError(message, status=502) from None
        exchange.end(data)
        return Response(data, status_code=response.status_code, headers=headers)

    def _copy(self, sent: _Sent, arm: Arm) -> None:
        """Send a copy of ``sent`` to ``arm``, beside the answer."""
        if len(self._shadows) >= self._plan.shadows_at_once:
            self._meters.shadow_left_out(sent.agent, arm.name)
            return
        task = asyncio.create_task(self._shadow(sent, arm))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def _shadow(self, sent: _Sent, arm: Arm) -> None:
        exchange = _Exchange(self, sent, arm, shadow=True)
        try:
            response = await exchange.open("POST")
            exchange.end(await response.aread())
        except httpx.HTTPError as error:
            exchange.fail(error)

    async def send(self, method: str, sent: _Sent, arm: Arm) -> httpx.Response:
        """The response of ``arm``, whose body is not read yet."""
        dialect = dialect_of_path(sent.path)
        key_header = "authorization" if dialect is None else dialect.KEY_HEADER
        headers = arm.headers(sent.headers, key_header)
        if arm.is_local and sent.agent:  # for the prompts of the run
            headers[AGENT_HEADER] = quote(sent.agent, safe="")
        content = arm.content(sent.body, sent.data) if sent.data else None
        request = self._client.build_request(method, arm.url(sent.path, sent.query), headers=headers, content=content)
        return await self._client.send(request, stream=True)

    def observe(self, sent: _Sent, arm: Arm) -> ObservedCall | None:
        """The record of a call with its messages; None if none is kept."""
        if self._traces is None or dialect_of_path(sent.path) is None:
            return None
        return self._traces.begin(arm.url(sent.path, sent.query), arm.content(sent.body, sent.data), sent.agent)

    def answered(self, call: ArmCall) -> None:
        """Record ``call``."""
        self._book.call(call)
        self._meters.answered(call)
        if call.error is not None and (times := self._failures.count((call.arm, call.error[:100]))) is not None:
            shown = call.agent or "an agent without a name"
            logger.warning("model %r failed for %s%s: %s", call.arm, shown, times, call.error, extra=COUNTED)

    def remember(self, response: str, call: KnownCall) -> None:
        """Accept feedback about ``response``."""
        self._recent[response] = call
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)

    def busy(self, arm: str, change: int) -> None:
        """Count a request in progress at ``arm``, or one less."""
        self._meters.busy(arm, change)


class _Exchange:
    """One request to one arm. It is recorded once: by `end`, `fail`, or the end of `parts`."""

    def __init__(self, proxy: Proxy, sent: _Sent, arm: Arm, *, shadow: bool = False) -> None:
        self.id = f"call-{secrets.token_hex(8)}"
        self.is_stream = False
        self._proxy = proxy
        self._sent = sent
        self._arm = arm
        self._shadow = shadow
        self._clock, self._began = time.monotonic(), time.time()
        self._first_byte: float | None = None
        self._response: httpx.Response | None = None
        self._named: str | None = None
        # A shadow's responses reach nobody, so there is nothing to learn from them.
        self._observed = None if shadow else proxy.observe(sent, arm)
        self._know(None)
        proxy.busy(arm.name, 1)

    async def open(self, method: str) -> httpx.Response:
        """Send the request; return its response once that has begun. Raises `httpx.HTTPError`, and records a cancelled one."""
        try:
            self._response = await self._proxy.send(method, self._sent, self._arm)
        except asyncio.CancelledError:
            self._record(error=_DISCONNECTED)
            raise
        self._first_byte = time.monotonic() - self._clock
        content_type = self._response.headers.get("content-type", "")
        self.is_stream = content_type.startswith("text/event-stream")
        if self._observed is not None:
            self._observed.respond(self._response.status_code, content_type)
        return self._response

    async def parts(self) -> AsyncGenerator[bytes]:
        """The bytes of the response as they arrive."""
        assert self._response is not None
        data, error = bytearray(), _DISCONNECTED
        try:
            async for part in self._response.aiter_raw():
                data += part
                if self._named is None:
                    self._name(next((found for event in events_of(bytes(data)) if (found := response_id(event))), None))
                yield part
            error = None
        except httpx.HTTPError as failure:
            error = f"its stream ended early: {describe(failure)}"
            raise
        finally:
            await self._response.aclose()
            self._record(bytes(data), error=error)

    def end(self, data: bytes) -> None:
        """Record the complete response ``data``, which is no stream."""
        if self.is_stream:
            self._name(next((found for event in events_of(data) if (found := response_id(event))), None))
        else:
            self._name(_json_id(data))
        self._record(data)

    def fail(self, error: Exception) -> None:
        """Record that there is no response."""
        self._record(error=describe(error))

    def _name(self, response: str | None) -> None:
        self._named = response
        if response is not None and not self._shadow:
            self._know(response)

    def _know(self, response: str | None) -> None:
        """Accept feedback by the id of the call and that of its ``response``."""
        known = KnownCall(self.id, self._sent.agent, self._arm.name, response)
        for name in filter(None, (self.id, response)):
            self._proxy.remember(name, known)

    def _record(self, data: bytes = b"", *, error: str | None = None) -> None:
        sent, status = self._sent, 0 if self._response is None else self._response.status_code
        if error is None and status >= 400:
            error = f"status {status}: {data[:200].decode(errors='replace')}"
        dialect, read = dialect_of_path(sent.path), None
        if dialect is not None and (error is None or error == _DISCONNECTED):
            read = read_usage(dialect, data, streamed=self.is_stream)
            # Clients disconnect after the last event, before the end of the response.
            error = error if read is None else None
        self._proxy.busy(self._arm.name, -1)
        if self._observed is not None:
            self._observed.add(data)
            if error is None or status >= 400:
                self._observed.end()
            else:
                self._observed.fail(UpstreamError(error))
        self._proxy.answered(
            ArmCall(
                id=self.id,
                response=self._named,
                agent=sent.agent,
                conversation=sent.conversation,
                arm=self._arm.name,
                shadow=self._shadow,
                began=self._began,
                seconds=time.monotonic() - self._clock,
                first_byte=self._first_byte,
                status=status,
                error=error,
                **(read or ReadResponse())._asdict(),
            )
        )


def _json_id(data: bytes) -> str | None:
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return response_id(cast("Mapping[str, Any]", value)) if isinstance(value, dict) else None
