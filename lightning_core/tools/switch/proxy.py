"""Sends each request to the arm of its conversation, and records the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, cast
from urllib.parse import quote, unquote

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lightning_core.capture.address import AGENT_HEADER
from lightning_core.chat.json_text import show_json
from lightning_core.endpoint.agents.agent_urls import split_path
from lightning_core.endpoint.refusals import credentials, error_response
from lightning_core.endpoint.sessions import UNKNOWN_KEY, Sessions
from lightning_core.endpoint.transport.event_stream import disconnected
from lightning_core.endpoint.transport.guard import dialect_of
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.transport.receive import check_strings, check_values, plain_body, read_body, read_json
from lightning_core.endpoint.transport.server_client import ServerClient
from lightning_core.errors import COUNTED, PolicyRequestError, Repeats, describe
from lightning_core.tools.record.naming import CallNames
from lightning_core.tools.record.observed import ObservedCall
from lightning_core.tools.switch.arm import Arm, dialect_of_path, is_forwarded, requested_model
from lightning_core.tools.switch.exchange import ArmExchange, SentRequest
from lightning_core.tools.switch.meters import Meters
from lightning_core.tools.switch.plan import SwitchPlan
from lightning_core.tools.switch.recorded import SwitchTraces
from lightning_core.tools.switch.shares import Shares, conversation_of
from lightning_core.tools.switch.store import ArmCall, KnownCall, SwitchStore

logger = logging.getLogger(__name__)

ARM_HEADER = "lightning-arm"
"""Header of a response: the model that answered, by its name in the plan."""
CALL_HEADER = "lightning-call"
"""Header of a response: the id of the call, for feedback."""

_RECENT = 20_000
"""Responses whose feedback is accepted before they are in the file."""
_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 600.0
"""Longest time in which an arm sends nothing, as in the SDKs of OpenAI and Anthropic."""
_POLL_SECONDS = 0.1
_RETRIED = (429, 529)
_LONGEST_NAME = 200
_SHADOW_SECONDS = 10.0
"""Time that shadow requests in progress have when the switch ends."""
# Of one connection, or added again. Whole bodies and streams are decoded.
_NOT_RETURNED = frozenset(
    {
        "connection",
        "keep-alive",
        "transfer-encoding",
        "content-length",
        "content-encoding",
        "date",
        "server",
        "set-cookie",
    }
)


class Proxy:
    """Answers model calls from ``arms``. Runs on one event loop."""

    def __init__(
        self,
        plan: SwitchPlan,
        arms: Mapping[str, Arm],
        store: SwitchStore,
        meters: Meters,
        sessions: Sessions,
        limits: Limits,
        traces: SwitchTraces | None = None,
    ) -> None:
        self.use(plan, arms)
        self.traces = traces
        self.meters = meters
        self._store = store
        self._sessions = sessions
        self._limits = limits
        self._in_progress: Counter[Arm] = Counter()
        self._client, self._local_client = _client(trust_env=True), _client(trust_env=False)
        self._recent: OrderedDict[str, Sequence[KnownCall]] = OrderedDict()
        self._shadows: set[asyncio.Task[None]] = set()
        self._failures = Repeats()

    def use(self, plan: SwitchPlan, arms: Mapping[str, Arm]) -> None:
        """Answer the next requests by ``plan``, from ``arms``. Those in progress end with the arms that they have."""
        self.shares = {
            name: Shares(arms=dict(agent.arms), shadow=agent.shadow, fallback=agent.fallback)
            for name, agent in plan.agents.items()
        }
        """By the keys of ``plan.agents``."""
        self._plan = plan
        self._arms = arms
        self._names = CallNames(rules=[rule.model_dump() for rule in plan.named])

    async def wait_until_idle(self, arm: Arm) -> None:
        """Wait until no request in progress needs ``arm``."""
        while self._in_progress[arm]:
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """End the shadow requests, after a while, and close the connections."""
        if self._shadows:
            _, late = await asyncio.wait(self._shadows, timeout=_SHADOW_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._client.aclose()
        await self._local_client.aclose()

    async def find(self, response: str) -> KnownCall | None:
        """The call with this id, or whose response has it. Raises `PolicyRequestError` if several responses have it."""
        calls = self._recent.get(response) or await asyncio.to_thread(self._store.find, response)
        if len(calls) > 1:
            raise PolicyRequestError(
                f"several responses have the id {show_json(response)}, as some servers repeat their ids: use the id of the call, which "
                f"is in the response's header {CALL_HEADER}",
                status=409,
                param="response",
            )
        return calls[0] if calls else None

    async def respond(self, request: Request) -> Response:
        """The response of an arm, as it is; or a refusal in the format of the client."""
        try:
            return await self._respond(request)
        except PolicyRequestError as error:
            return error_response(dialect_of(request), error)
        except ClientDisconnect:  # before its response
            return Response(status_code=400)

    async def _respond(self, request: Request) -> Response:
        if self._sessions.find(credentials(request)) is None:
            raise PolicyRequestError(UNKNOWN_KEY, status=401)
        raw_path = request.scope["raw_path"].decode("latin-1").partition("?")[0]
        in_url, path = split_path(raw_path)
        if not is_forwarded(request.method, path):
            raise PolicyRequestError(
                f"the switch forwards no {request.method} {request.url.path}: expected a POST of a model call, such as "
                "/v1/chat/completions, /v1/responses, /v1/messages or /v1beta/models/MODEL:generateContent",
                status=404,
            )
        limits = self._limits
        data = await read_body(request, most_bytes=limits.body_bytes, seconds=limits.body_seconds)
        data = plain_body(data, request.headers.get("content-encoding", ""), most_bytes=limits.body_bytes)
        read = partial(self._read, request, in_url, path, data)
        sent = await self._sessions.large_work.run("switch", len(data), read)
        previous = sent.body.get("previous_response_id")
        known = await self._continued(previous) if isinstance(previous, str) else None
        # From here to the request nothing is awaited, so the plan does not change.
        rule = self._plan.rule_of(sent.agent)
        default = {} if self._plan.default is None else {self._plan.default: 1.0}
        shares = Shares(arms=default) if rule is None else self.shares[rule]
        if not shares.arms:
            raise PolicyRequestError(self._unknown(sent), status=404)
        if known is not None and known.arm in self._arms:  # a conversation that the server keeps
            sent.conversation = known.conversation
            arm = self._arms[known.arm]
        else:
            arm = self._arms[shares.choose(sent.agent, sent.conversation)]
        if shares.shadow not in (None, arm.name) and dialect_of_path(path) is not None:
            self._copy(sent, self._arms[shares.shadow])
        if shares.fallback in (None, arm.name):
            return await _while_connected(request.receive, self._answer(sent, arm, None))
        fallback = self._arms[shares.fallback]
        self._count(fallback, 1)  # so that its model stays open until it may be needed
        try:
            return await _while_connected(request.receive, self._answer(sent, arm, fallback))
        finally:
            self._count(fallback, -1)

    async def _continued(self, previous: str) -> KnownCall | None:
        with contextlib.suppress(PolicyRequestError):
            return await self.find(previous)
        return None

    def _read(self, request: Request, in_url: str | None, path: str, data: bytes) -> SentRequest:
        check_strings(data, self._limits.strings)
        check_values(data, self._limits.values)
        value = read_json(data)
        if not isinstance(value, dict):
            raise PolicyRequestError("the request body is not a JSON object")
        body = cast("Mapping[str, Any]", value)
        headers = [(name.lower(), text) for name, text in request.headers.items()]
        by_name = dict(headers)
        agent = in_url or unquote(by_name.get(AGENT_HEADER, ""))
        if not agent:
            model = requested_model(path, body)
            agent = self._names.find(body) or (model if model in self._plan.agents else "")
        if len(agent) > _LONGEST_NAME or not agent.isprintable():
            raise PolicyRequestError(
                f"the agent's name is {show_json(agent[:_LONGEST_NAME])}; expected at most {_LONGEST_NAME} printable characters"
            )
        return SentRequest(
            agent=agent,
            conversation=conversation_of(by_name, body),
            path=path,
            query=request.url.query,
            headers=headers,
            body=body,
            data=data,
        )

    def _unknown(self, sent: SentRequest) -> str:
        listed = ", ".join(self._plan.agents) or "none"
        found = f"agent {show_json(sent.agent)}, which is not listed" if sent.agent else "no agent"
        return (
            f"the request names {found}; the agents are {listed}. Name it in the client's base URL (/a/NAME/v1), in the header "
            f"{AGENT_HEADER}, by a rule under named, or set default"
        )

    async def _answer(self, sent: SentRequest, arm: Arm, fallback: Arm | None) -> Response:
        exchange = ArmExchange(self, sent, arm)
        try:
            response = await exchange.open()
            is_failure = response.status_code in _RETRIED or response.status_code >= 500
            data = b"" if exchange.is_stream and not is_failure else await response.aread()
            is_failure = is_failure or exchange.reports_failure(data)
        except BaseException as error:
            exchange.fail(error)
            if not isinstance(error, Exception):  # cancelled
                raise
            if fallback is not None:
                return await self._answer(sent, fallback, None)
            message = f"model {arm.name!r} of the switch has no response: {describe(error)}"
            raise PolicyRequestError(message, status=502) from None
        headers = _returned(response.headers.raw) | {ARM_HEADER: quote(arm.name), CALL_HEADER: exchange.id}
        if exchange.is_stream and not is_failure:
            return EventStreamResponse(exchange.parts(), status_code=response.status_code, headers=headers)
        exchange.end(data)
        if is_failure and fallback is not None:
            return await self._answer(sent, fallback, None)
        return Response(data, status_code=response.status_code, headers=headers)

    def _copy(self, sent: SentRequest, arm: Arm) -> None:
        """Send a copy of ``sent`` to ``arm``, beside the answer."""
        if len(self._shadows) >= self._plan.shadows_at_once:
            self.meters.shadow_left_out(sent.agent, arm.name)
            return
        task = asyncio.create_task(self._shadow(ArmExchange(self, sent, arm, shadow=True)))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def _shadow(self, exchange: ArmExchange) -> None:
        try:
            response = await exchange.open()
            exchange.end(await response.aread())
        except BaseException as error:
            exchange.fail(error)
            if not isinstance(error, Exception):
                raise

    async def send(self, sent: SentRequest, arm: Arm) -> httpx.Response:
        """The response of ``arm``, whose body is not read yet."""
        dialect = dialect_of_path(sent.path)
        headers = arm.headers(sent.headers, "authorization" if dialect is None else dialect.KEY_HEADER)
        if arm.is_own and sent.agent:  # for the prompts of the run
            headers.append((AGENT_HEADER.encode(), quote(sent.agent, safe="").encode()))
        client = self._local_client if arm.is_local else self._client
        request = client.build_request(
            "POST", arm.url(sent.path, sent.query), headers=headers, content=arm.content(sent.body, sent.data)
        )
        return await client.send(request, stream=True)

    def observe(self, sent: SentRequest, arm: Arm) -> ObservedCall | None:
        """The record of a call with its messages; None if none is kept."""
        if self.traces is None or dialect_of_path(sent.path) is None:
            return None
        content = arm.content(sent.body, sent.data)
        return self.traces.begin(arm.url(sent.path, ""), content, sent.agent, sent.conversation)

    def answered(self, read: Callable[[], ArmCall], size: int) -> None:
        """Record the call that ``read`` returns, on the thread of the record."""

        def count() -> ArmCall:
            call = read()
            self.meters.answered(call)
            # Not by the whole text: a server's errors may have ids.
            cause = (call.arm, (call.error or "").partition(":")[0]) if call.is_failure else None
            if cause is not None and (times := self._failures.count(cause)) is not None:
                shown = call.agent or "an agent without a name"
                logger.warning("model %r failed for %s%s: %s", call.arm, shown, times, call.error, extra=COUNTED)
            return call

        self._store.call(count, size)

    def busy(self, arm: Arm, change: int) -> None:
        """Count a request of ``arm`` in progress, or one less."""
        self.meters.busy(arm.name, change)
        self._count(arm, change)

    def _count(self, arm: Arm, change: int) -> None:
        self._in_progress[arm] += change
        if not self._in_progress[arm]:
            del self._in_progress[arm]

    def remember(self, response: str, call: KnownCall) -> None:
        """Accept feedback about ``response``."""
        others = [known for known in self._recent.get(response, ()) if known.id != call.id]
        self._recent[response] = (*others[:1], call)
        self._recent.move_to_end(response)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)


class EventStreamResponse(StreamingResponse):
    """A stream whose generator is closed when the client disconnects, so that it is recorded then."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        async with aclosing(cast("AsyncGenerator[bytes]", self.body_iterator)):
            await super().__call__(scope, receive, send)


async def _while_connected(receive: Receive, answer: Coroutine[Any, Any, Response]) -> Response:
    """The response of ``answer``, which is cancelled if the client disconnects before. Raises `ClientDisconnect` then."""
    work, left = asyncio.create_task(answer), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        for task in (work, left):
            task.cancel()
        await asyncio.wait({work, left})


def _returned(raw: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers of a response to the client: of any bytes, each as its character in Latin-1, as Starlette encodes them."""
    returned: dict[str, str] = {}
    for name, value in ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw):
        if name not in _NOT_RETURNED:
            returned[name] = f"{returned[name]}, {value}" if name in returned else value
    return returned


def _client(*, trust_env: bool) -> ServerClient:
    """A client; ``trust_env``: with the proxies of the environment."""
    return ServerClient(
        timeout=httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS, pool=None),
        connections=None,
        idle=100,
        cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=[])),  # it has the requests of all clients
        trust_env=trust_env,
    )
