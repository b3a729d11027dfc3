"""Clients whose transport answers in this process: their requests are left alone, and those that look like model calls are counted."""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpcore
import httpx
import httpx2
import pytest
import requests
import urllib3
from requests.adapters import BaseAdapter, HTTPAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import scope
from lightning_core.chat.chat import Chat
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing import Playground
from lightning_core.testing.recording_server import RecordingServer
from tests.propagation.requests_elsewhere import elsewhere

PATH = "/chat/completions"
URL = f"http://app.test{PATH}"
BODY = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
OWN = {"authorization": "Bearer sk-own"}


@pytest.fixture
def playground() -> Iterator[Playground]:
    backend = ScriptedBackend(lambda prompt: "four")
    with patched([]), Playground(backend, chats=Chat(backend.tokenizer)) as opened:
        yield opened


async def complete(request: Request) -> Response:
    """The user's own application: it shows what it got."""
    return JSONResponse({"own": (await request.json()), "key": request.headers.get("authorization")})


app = Starlette(routes=[Route(PATH, complete, methods=["POST"]), Route("/orders", complete, methods=["POST"])])


def wsgi(environ: Any, start: Any) -> list[bytes]:
    body = json.loads(environ["wsgi.input"].read())
    start("200 OK", [("content-type", "application/json")])
    return [json.dumps({"own": body, "key": environ.get("HTTP_AUTHORIZATION")}).encode()]


def with_test_client(url: str, body: Any) -> Any:
    with TestClient(app, base_url="http://app.test", headers=OWN) as client:
        return client.post(url, json=body).json()


def with_wsgi(library: Any, url: str, body: Any) -> Any:
    with library.Client(transport=library.WSGITransport(wsgi), headers=OWN) as client:
        return client.post(url, json=body).json()


def with_asgi(library: Any, url: str, body: Any) -> Any:
    async def main() -> Any:
        async with library.AsyncClient(transport=library.ASGITransport(app), headers=OWN) as client:
            return (await client.post(url, json=body)).json()

    return asyncio.run(main())


def with_mock(library: Any, url: str, body: Any) -> Any:
    def answer(request: Any) -> Any:
        return library.Response(200, json={"own": json.loads(request.content), "key": request.headers["authorization"]})

    with library.Client(mounts={"all://app.test": library.MockTransport(answer)}, headers=OWN) as client:
        return client.post(url, json=body).json()


def with_own_transport(library: Any, url: str, body: Any) -> Any:
    class Canned(library.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            content = {"own": json.loads(request.read()), "key": request.headers["authorization"]}
            return library.Response(200, json=content)

    with library.Client(transport=Canned(), headers=OWN) as client:
        return client.post(url, json=body).json()


def response_of(request: requests.PreparedRequest) -> requests.Response:
    response = requests.Response()
    response.status_code, response.url = 200, str(request.url)
    own = json.loads(request.body or b"")
    response._content = json.dumps({"own": own, "key": request.headers["authorization"]}).encode()
    return response


def with_adapter(url: str, body: Any) -> Any:
    class Adapter(BaseAdapter):
        def send(self, request: Any, *args: Any, **kwargs: Any) -> requests.Response:
            return response_of(request)

        def close(self) -> None:
            pass

    with requests.Session() as session:
        session.mount("http://app.test", Adapter())
        return session.post(url, json=body, headers=OWN).json()


def with_patched_adapter(url: str, body: Any) -> Any:
    """As the package ``responses`` patches it, inside the rollout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HTTPAdapter, "send", lambda adapter, request, **options: response_of(request))
        return requests.post(url, json=body, headers=OWN).json()


def with_patched_transport(library: Any, url: str, body: Any) -> Any:
    """As the package ``pytest-httpx`` patches it."""

    def handle(transport: Any, request: Any) -> Any:
        return library.Response(200, json={"own": json.loads(request.read()), "key": request.headers["authorization"]})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.HTTPTransport, "handle_request", handle)
        return library.post(url, json=body, headers=OWN).json()


def with_patched_pool(url: str, body: Any) -> Any:
    """As the packages ``respx`` and ``vcrpy`` patch it."""

    def handle(pool: Any, request: Any) -> Any:
        content = {"own": json.loads(b"".join(request.stream)), "key": dict(request.headers)[b"authorization"].decode()}
        return httpcore.Response(200, content=json.dumps(content).encode())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore.ConnectionPool, "handle_request", handle)
        return httpx.post(url, json=body, headers=OWN).json()


Send = Callable[[str, Any], Any]
both = [httpx, httpx2]
every_way = pytest.mark.parametrize(
    "send",
    [
        with_test_client,
        with_adapter,
        with_patched_adapter,
        with_patched_pool,
        *(
            pytest.param(partial(way, library), id=f"{library.__name__} {way.__name__}")
            for library in both
            for way in (with_wsgi, with_asgi, with_mock, with_own_transport, with_patched_transport)
        ),
    ],
)


@every_way
def test_a_request_that_is_answered_in_this_process_is_left_alone(send: Send, playground: Playground) -> None:
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        for _ in range(2):
            assert send(URL, BODY) == {"own": BODY, "key": "Bearer sk-own"}
    assert run.trace.calls == ()
    assert elsewhere(run) == {("writer", "app.test", "answered by its own transport"): 2}
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        assert send("http://app.test/orders", {"item": 1})["own"] == {"item": 1}
    assert elsewhere(run) == {("writer", "app.test", "not a model call"): 1}


@every_way
def test_it_is_no_stray_call_outside_a_rollout(send: Send, playground: Playground) -> None:
    with playground.rollout(train=["writer"]) as run:
        assert contextvars.Context().run(send, URL, BODY)["own"] == BODY
    assert run.infrastructure == []


@pytest.mark.parametrize("library", both)
def test_a_transport_around_one_with_a_network_is_redirected(
    library: Any, playground: Playground, server: RecordingServer
) -> None:
    class Retrying(library.BaseTransport):
        def __init__(self) -> None:
            self.inner = library.HTTPTransport()

        def handle_request(self, request: Any) -> Any:
            return self.inner.handle_request(request)

    class Creating(library.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            response = library.HTTPTransport().handle_request(request)
            response.read()
            return response

    class Logging(HTTPAdapter):
        def send(self, request: Any, *args: Any, **kwargs: Any) -> requests.Response:
            return super().send(request, *args, **kwargs)

    with playground.rollout(train=["writer"]) as run, scope("writer"):
        for transport in (Retrying(), Creating()):
            with library.Client(transport=transport) as client:
                assert client.post(f"{server.url}{PATH}", json=BODY).json()["choices"]
        with requests.Session() as session:
            session.mount("http://", Logging())
            assert session.post(f"{server.url}{PATH}", json=BODY).json()["choices"]
    assert [call.agent for call in run.trace.calls] == ["writer"] * 3
    assert server.requests == []
    assert elsewhere(run) == {}


def test_a_connection_class_that_answers_itself_is_left_alone(playground: Playground) -> None:
    """As ``vcrpy`` replaces the connections of urllib3."""

    class Recorded(urllib3.connection.HTTPConnection):
        def request(self, *args: Any, **kwargs: Any) -> None:
            pass

        def endheaders(self, *args: Any, **kwargs: Any) -> None:
            pass

        def getresponse(self) -> Any:
            return urllib3.HTTPResponse(io.BytesIO(b'"own"'), status=200, preload_content=False)

    with playground.rollout(train=["writer"]) as run, scope("writer"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(urllib3.connectionpool.HTTPConnectionPool, "ConnectionCls", Recorded)
        assert requests.post(URL, json=BODY).json() == "own"
    assert run.trace.calls == ()
    assert elsewhere(run) == {("writer", "app.test", "answered by its own transport"): 1}


def test_a_connection_class_without_a_network_is_left_alone(playground: Playground) -> None:
    """urllib3 needs no base class for its connections."""

    class Answers:
        is_closed = is_verified = proxy_is_verified = True

        def __init__(self, **settings: Any) -> None:
            self.timeout = None

        def request(self, *args: Any, **kwargs: Any) -> None:
            pass

        def getresponse(self) -> Any:
            return urllib3.HTTPResponse(io.BytesIO(b"own"), status=200, preload_content=False)

        def close(self) -> None:
            pass

    with playground.rollout(train=["writer"]) as run, scope("writer"), urllib3.HTTPConnectionPool("app.test") as pool:
        pool.ConnectionCls = Answers  # pyright: ignore[reportAttributeAccessIssue]
        assert pool.request("POST", "/", body=b"{}").data == b"own"
    assert run.trace.calls == ()


def test_a_body_without_the_fields_of_a_model_call_is_left_alone(
    playground: Playground, server: RecordingServer
) -> None:
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        httpx.post(f"{server.url}{PATH}", json={"prompt": "of an application"})
    assert run.trace.calls == ()
    assert [noted.url for noted in server.requests] == [f"{server.url}{PATH}"]
