"""Every HTTP client against the real endpoint and a provider on this machine: no call of a trained agent reaches the provider."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import httpx2
import pytest
import requests
import urllib3
from starlette.responses import JSONResponse

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import ActiveRollout, scope
from lightning_core.chat.chat import Chat
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing import Playground
from lightning_core.testing.recording_server import RecordingServer
from tests.propagation.requests_elsewhere import elsewhere

BODY = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer sk-own"}

Client = Callable[[str, dict[str, Any]], bytes]


def with_httpx(url: str, body: dict[str, Any]) -> bytes:
    with httpx.stream("POST", url, json=body, headers=HEADERS) as response:
        return b"".join(response.iter_raw())


def with_httpx2(url: str, body: dict[str, Any]) -> bytes:
    return httpx2.post(url, content=json.dumps(body), headers=HEADERS).content


def with_async_httpx(url: str, body: dict[str, Any]) -> bytes:
    async def main() -> bytes:
        async with httpx.AsyncClient() as client, client.stream("POST", url, json=body, headers=HEADERS) as response:
            return b"".join([part async for part in response.aiter_bytes()])

    return asyncio.run(main())


def with_aiohttp(url: str, body: dict[str, Any]) -> bytes:
    async def main() -> bytes:
        async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=HEADERS) as response:
            return b"".join([part async for part in response.content.iter_any()])

    return asyncio.run(main())


def with_aiohttp_bytes(url: str, body: dict[str, Any]) -> bytes:
    async def main() -> bytes:
        data = json.dumps(body).encode()
        async with aiohttp.ClientSession(headers=HEADERS) as session, session.post(url, data=data) as response:
            return await response.read()

    return asyncio.run(main())


def with_requests(url: str, body: dict[str, Any]) -> bytes:
    with requests.post(url, json=body, headers=HEADERS, stream=True) as response:
        return b"".join(response.iter_content(None))


def with_urllib3(url: str, body: dict[str, Any]) -> bytes:
    with urllib3.PoolManager() as pools:
        response = pools.request("POST", url, json=body, headers=HEADERS, preload_content=False)
        return b"".join(response.stream())


def with_urllib(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), HEADERS)
    with urllib.request.build_opener().open(request) as response:
        return response.read()


def with_http_client(url: str, body: dict[str, Any]) -> bytes:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    try:
        connection.request("POST", urlsplit(url).path, json.dumps(body), HEADERS)
        return connection.getresponse().read()
    finally:
        connection.close()


every_client = pytest.mark.parametrize(
    "client",
    [
        with_httpx,
        with_httpx2,
        with_async_httpx,
        with_aiohttp,
        with_aiohttp_bytes,
        with_requests,
        with_urllib3,
        with_urllib,
        with_http_client,
    ],
)


@pytest.fixture
def playground() -> Iterator[Playground]:
    backend = ScriptedBackend(lambda prompt: "four")
    with patched([]), Playground(backend, chats=Chat(backend.tokenizer)) as opened:
        yield opened


def agents_of(run: ActiveRollout) -> list[str | None]:
    return [call.agent for call in run.trace.calls]


@every_client
@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/chat/completions", True),
        ("/api/v3/chat/completions/", False),
        pytest.param("/v1/chat/completions", False, marks=pytest.mark.long),
        pytest.param("/api/v3/chat/completions/", True, marks=pytest.mark.long),
        pytest.param("/inference/openai/chat/completions", False, marks=pytest.mark.long),
        pytest.param("/inference/openai/chat/completions", True, marks=pytest.mark.long),
    ],
)
def test_a_trained_agent_never_reaches_the_provider(
    client: Client, stream: bool, path: str, playground: Playground, server: RecordingServer
) -> None:
    with playground.rollout(train=["writer"]) as run, scope("writer"):
        answer = client(f"{server.url}{path}", {**BODY, "stream": stream})
    text = answer.decode()
    if stream:
        assert text.rstrip().endswith("data: [DONE]")
    else:
        assert json.loads(text)["choices"][0]["message"]["content"] == "four"
    assert agents_of(run) == ["writer"]
    assert run.trace.calls[0].output_ids is not None
    assert server.requests == []
    assert elsewhere(run) == {}


@every_client
@pytest.mark.parametrize("stream", [False, True])
def test_another_agent_reaches_its_provider(
    client: Client, stream: bool, playground: Playground, server: RecordingServer
) -> None:
    with playground.rollout(train=["writer"]) as run:
        with scope("writer"):
            client("https://api.openai.com/v1/chat/completions", BODY)
        with scope("critic"):
            answer = client(f"{server.url}/prefix/v1/chat/completions", {**BODY, "stream": stream})
    assert (b"[DONE]" if stream else b'"ok"') in answer
    (noted,) = server.requests
    assert noted.url == f"{server.url}/prefix/v1/chat/completions"
    assert noted.headers["authorization"] == "Bearer sk-own"
    assert noted.body == {**BODY, "stream": stream}
    assert agents_of(run) == ["writer", "critic"]


OTHER = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "options": {"num_ctx": 8}}
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host;x-amz-date, Signature=c",
    "X-Amz-Date": "20261122T000000Z",
    "x-api-key": "own",
    "Content-Type": "application/json",
    "traceparent": "00-00000000000000000000000000000001-0000000000000001-01",
}


@pytest.mark.parametrize("path", ["/api/chat", "/v2/chat?version=1", "/model/anthropic.claude%3A0/converse"])
def test_another_wire_format_passes_through_byte_for_byte(
    path: str, playground: Playground, server: RecordingServer
) -> None:
    data = json.dumps(OTHER, indent=3).encode()
    with playground.rollout(train=["writer"]) as run:
        with scope("writer"):
            with_httpx("https://api.openai.com/v1/chat/completions", BODY)
        with scope("critic"):
            response = httpx.post(f"{server.url}{path}", content=data, headers=SIGNED)
    assert response.json()["choices"][0]["message"]["content"] == "ok"
    (noted,) = server.requests
    assert noted.url == f"{server.url}{path}"
    assert noted.data == data
    assert noted.headers["host"] == server.url.removeprefix("http://")
    for name in ("Authorization", "X-Amz-Date", "x-api-key", "Content-Type"):
        assert noted.headers[name.lower()] == SIGNED[name]
    assert not [name for name in noted.headers if name.startswith("lightning")]
    assert "lr-" not in str(noted.headers)
    assert agents_of(run) == ["writer", "critic"]
    call = run.trace.calls[1]
    assert call.output_ids is None
    assert list(call.messages) == OTHER["messages"]


def test_errors_and_streams_of_another_wire_format(playground: Playground, server: RecordingServer) -> None:
    def call(**more: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/api/chat", json={**OTHER, **more})

    with playground.rollout(train=["writer"], strict=False) as run:
        with scope("writer"):
            with_httpx("https://api.openai.com/v1/chat/completions", BODY)
        with scope("critic"):
            assert "[DONE]" in call(stream=True).text
            server.refusal = JSONResponse({"error": "no such model"}, 404, {"x-own": "kept"})
            refused = call()
            server.refusal = JSONResponse({"error": "bad"}, 400)
            bad = call()
    assert (refused.status_code, refused.json(), refused.headers["x-own"]) == (404, {"error": "no such model"}, "kept")
    assert bad.status_code == 400
    assert len(run.infrastructure) == 1, "the 404 only: the agent's own request caused the 400"


@pytest.mark.parametrize(
    ("path", "where"),
    [("/api/chat", ("error",)), ("/model/claude/converse", ("message",)), ("/v2/chat", ("error", "message"))],
)
def test_a_trained_agent_with_another_wire_format_is_refused(
    path: str, where: tuple[str, ...], playground: Playground, server: RecordingServer
) -> None:
    with playground.rollout(train=["writer"], strict=False) as run, scope("writer"):
        response = httpx.post(f"{server.url}{path}", json=OTHER)
    assert response.status_code == 400
    message: Any = response.json()
    for name in where:
        message = message[name]
    assert path in message
    assert "OpenAI-compatible" in message
    assert server.requests == []
    assert agents_of(run) == ["writer"], "refused calls are calls"
