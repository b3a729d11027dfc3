"""Clients whose hooks, middlewares and transports change a request after it was stamped: gateways, and credentials set late."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import httpx2
import pytest

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import scope
from lightning_core.chat.chat import Chat
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing import Playground
from lightning_core.testing.recording_server import RecordingServer
from tests.propagation.requests_elsewhere import elsewhere

URL = "https://api.openai.com/v1/chat/completions"
BODY = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
OWN = {"authorization": "Bearer sk-own"}

Change = Callable[[Any], None]
"""Changes the URL or the headers of a request object."""
Send = Callable[[Change], str]


def with_transport(library: Any, change: Change) -> str:
    class Gateway(library.HTTPTransport):
        def handle_request(self, request: Any) -> Any:
            change(request)
            return super().handle_request(request)

    with library.Client(transport=Gateway(), headers=OWN) as client:
        return client.post(URL, json=BODY).text


def with_async_transport(library: Any, change: Change) -> str:
    class Gateway(library.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            change(request)
            return await super().handle_async_request(request)

    async def main() -> str:
        async with library.AsyncClient(transport=Gateway(), headers=OWN) as client:
            return (await client.post(URL, json=BODY)).text

    return asyncio.run(main())


def with_hook(library: Any, change: Change) -> str:
    with library.Client(event_hooks={"request": [change]}, headers=OWN) as client:
        return client.post(URL, json=BODY).text


def with_middleware(change: Change) -> str:
    async def middleware(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        change(request)
        return await handler(request)

    async def main() -> str:
        async with (
            aiohttp.ClientSession(middlewares=[middleware], headers=OWN) as session,
            session.post(URL, json=BODY) as response,
        ):
            return await response.text()

    return asyncio.run(main())


every_way = pytest.mark.parametrize(
    "send",
    [
        pytest.param(lambda change: with_transport(httpx, change), id="httpx transport"),
        pytest.param(lambda change: with_async_transport(httpx, change), id="async httpx transport"),
        pytest.param(lambda change: with_hook(httpx, change), id="httpx hook"),
        pytest.param(lambda change: with_transport(httpx2, change), id="httpx2 transport"),
        pytest.param(lambda change: with_hook(httpx2, change), id="httpx2 hook"),
        pytest.param(with_middleware, id="aiohttp middleware"),
    ],
)


@pytest.fixture
def playground() -> Iterator[Playground]:
    backend = ScriptedBackend(lambda prompt: "four")
    with patched([]), Playground(backend, chats=Chat(backend.tokenizer)) as opened:
        yield opened


def to_gateway(server: RecordingServer, path: str | None = None) -> Change:
    """Sends a request to ``server``, as the proxy of a company does."""

    def change(request: Any) -> None:
        old = httpx.URL(str(request.url))
        request.url = type(request.url)(f"{server.url}{path or old.path}")
        request.headers["host"] = server.url.removeprefix("http://")

    return change


def with_own_span(request: Any) -> None:
    """As tracers do, so that the server's spans are in their trace."""
    request.headers["traceparent"] = f"00-{'1' * 32}-{'2' * 16}-01"


def with_own_key(request: Any) -> None:
    request.headers["Authorization"] = "Bearer late"


@every_way
def test_a_trained_agent_never_reaches_a_gateway(send: Send, playground: Playground, server: RecordingServer) -> None:
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        tenant = to_gateway(server, "/tenant/openai/chat/completions")
        for change in (to_gateway(server), tenant, with_own_key, with_own_span):
            assert json.loads(send(change))["choices"][0]["message"]["content"] == "four"
    (agent,) = (event for event in run.trace.events if event.kind == "agent")
    assert [(call.agent, call.parent) for call in run.trace.calls] == [("writer", agent.id)] * 4
    assert server.requests == []
    assert elsewhere(run) == {}


@every_way
def test_another_agent_reaches_its_gateway_with_its_own_key(
    send: Send, playground: Playground, server: RecordingServer
) -> None:
    with playground.rollout(train=["writer"]) as run:
        with scope("writer"):
            httpx.post(URL, json=BODY)
        with scope("critic"):
            for change in (
                to_gateway(server),
                lambda request: (to_gateway(server)(request), with_own_key(request))[0],
            ):
                assert '"ok"' in send(change)
    assert [noted.headers["authorization"] for noted in server.requests] == ["Bearer sk-own", "Bearer late"]
    assert {noted.url for noted in server.requests} == {f"{server.url}/v1/chat/completions"}
    assert [call.agent for call in run.trace.calls] == ["writer", "critic", "critic"]


@every_way
def test_a_gateway_that_is_ignored_gets_nothing_of_ours(
    send: Send, playground: Playground, server: RecordingServer
) -> None:
    host = server.url.removeprefix("http://")
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        run.ignore_hosts = (host,)
        assert '"ok"' in send(to_gateway(server))
    (noted,) = server.requests
    assert noted.headers["authorization"] == "Bearer sk-own"
    assert not [name for name in noted.headers if name.startswith("lightning")]
    assert noted.body == BODY
    assert elsewhere(run) == {("writer", host, "ignored"): 1}


def test_a_transport_of_another_library_is_counted(playground: Playground, server: RecordingServer) -> None:
    """It opens connections of its own, which lead elsewhere."""

    class Sockets(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            target = urlsplit(server.url)
            with socket.create_connection((target.hostname, target.port)) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                connection.recv(1024)
            return httpx.Response(200, json={})

    with (
        playground.rollout(train=["writer"]) as run,
        scope("writer"),
        httpx.Client(transport=Sockets()) as client,
    ):
        client.post(URL, json=BODY)
    host = server.url.removeprefix("http://")
    assert elsewhere(run) == {
        ("writer", host, "connection by other code"): 1,
        ("writer", "api.openai.com", "answered by its own transport"): 1,
    }
