"""The headers and URLs of model requests: the caller's address, and routing."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import httpx2
import openai
import pytest

from lightning_core.capture import Run, current_address, current_run, rollout, scope
from lightning_core.capture.http_clients import install_client, stamp
from lightning_core.capture.patching import Patches
from lightning_core.testing.recording_server import RecordingServer
from lightning_core.trace import Address

CHAT = "https://api.openai.com/v1/chat/completions"
STAMPS = {"traceparent", "lightning-agent", "lightning-origin", "lightning-origin-authorization"}


@pytest.fixture
def client_patches() -> Iterator[None]:
    patches = Patches(lambda: current_run() is not None)
    install_client(patches)
    yield
    patches.undo()


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def library(request: pytest.FixtureRequest, client_patches: None) -> Any:
    return request.param


def rollout_at(server: RecordingServer, **more: Any) -> rollout:
    return rollout(endpoint=f"{server.url}/v1", api_key="lr-key", **more)


def address_of(headers: dict[str, str]) -> Address:
    address = Address.from_headers(headers)
    assert address is not None
    return address


def test_a_request_to_a_provider_goes_to_the_endpoint(library: Any, server: RecordingServer) -> None:
    client = library.Client()
    with rollout_at(server) as run, scope("writer"):
        address = current_address()
        response = client.post(
            f"{CHAT}?a=b", json={"model": "gpt"}, headers={"authorization": "Bearer sk-own"}, auth=("user", "password")
        )
    assert response.json()["choices"][0]["message"]["content"] == "ok"
    (noted,) = server.requests
    assert noted.url == f"{server.url}/v1/chat/completions?a=b"
    assert noted.body == {"model": "gpt"}
    assert noted.headers["host"] == server.url.removeprefix("http://")
    assert noted.headers["authorization"] == "Bearer lr-key"
    assert noted.headers["lightning-origin"] == f"{CHAT}?a=b"
    assert noted.headers["lightning-origin-authorization"] == "Bearer sk-own"
    assert address_of(noted.headers) == address
    assert (address_of(noted.headers).rollout, address_of(noted.headers).agent) == (run.rollout, "writer")


def test_async_and_streaming(library: Any, server: RecordingServer) -> None:
    async def main() -> tuple[str, str]:
        async with library.AsyncClient() as client:
            plain = await client.post(CHAT, json={})
            async with client.stream("POST", CHAT, json={"stream": True}) as response:
                return plain.text, "".join([line async for line in response.aiter_lines()])

    with rollout_at(server), scope("writer"):
        plain, streamed = asyncio.run(main())
        with library.Client() as client, client.stream("POST", CHAT, json={"stream": True}) as response:
            assert "[DONE]" in "".join(response.iter_lines())
    assert json.loads(plain)
    assert "[DONE]" in streamed
    assert [address_of(noted.headers).agent for noted in server.requests] == ["writer"] * 3


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:9/v1"])
def test_everything_else_is_left_alone(library: Any, server: RecordingServer, endpoint: str | None) -> None:
    """Requests outside a rollout, in one without endpoint, and to a third party's server."""
    headers = {"authorization": "Bearer sk-own", "x-api-key": "k"}
    client = library.Client()
    client.post(f"{server.url}/v1/chat/completions", json={}, headers=headers)
    with rollout(endpoint=endpoint, api_key="lr-key"), scope("writer"):
        client.post(f"{server.url}/v1/chat/completions", json={}, headers=headers)
    first, second = server.requests
    assert first == second
    assert not STAMPS & set(first.headers)


def test_a_request_to_the_endpoint_itself_is_stamped(library: Any, server: RecordingServer) -> None:
    with rollout_at(server), scope("schreiber für Köln"):
        library.Client().get(f"{server.url}/v1/models", headers={"authorization": "Bearer none", "x-api-key": "none"})
    (noted,) = server.requests
    assert noted.url == f"{server.url}/v1/models"
    assert noted.headers["authorization"] == "Bearer lr-key"
    assert "x-api-key" not in noted.headers
    assert "lightning-origin" not in noted.headers
    assert address_of(noted.headers).agent == "schreiber für Köln"


class Request:
    def __init__(self, url: str, method: str = "POST", **headers: str) -> None:
        self.method = method
        self.url = httpx.URL(url)
        self.headers = httpx.Headers({name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("https://api.openai.com/v1/responses", "/v1/responses"),
        ("https://api.anthropic.com/v1/messages?beta=true", "/v1/messages?beta=true"),
        ("https://openrouter.ai/api/v1/chat/completions", "/v1/chat/completions"),
        ("https://api.groq.com/openai/v1/chat/completions", "/v1/chat/completions"),
        ("https://api.deepseek.com/chat/completions", "/v1/chat/completions"),
        ("https://generativelanguage.googleapis.com/v1beta/openai/chat/completions", "/v1/chat/completions"),
        (
            "https://my.openai.azure.com/openai/deployments/gpt/chat/completions?api-version=1",
            "/v1/chat/completions?api-version=1",
        ),
        ("https://api.openai.com/v1/embeddings", None),
        ("https://api.openai.com/v1/files", None),
        ("https://example.org/v1/chat/completions", None),
        ("https://notopenai.azure.com/openai/v1/chat/completions", None),
    ],
)
def test_paths(url: str, path: str | None) -> None:
    request = Request(url, api_key="sk")
    with rollout(endpoint="http://127.0.0.1:8000/v1", api_key="lr") as run:
        touched = stamp(request, run, run.address)
    assert touched is (path is not None)
    assert str(request.url) == (url if path is None else f"http://127.0.0.1:8000{path}")
    if path is not None:
        assert request.headers["lightning-origin"] == url
        assert request.headers["lightning-origin-authorization"] == "api-key sk"
        assert "api-key" not in request.headers


def test_only_posts_are_redirected_and_hosts_can_be_chosen() -> None:
    with rollout(endpoint="http://e:1/v1", api_key="lr", redirect_hosts=["localhost:11434", "models.lan"]) as run:
        for url, method, touched in (
            ("http://localhost:11434/v1/chat/completions", "POST", True),
            ("http://localhost:11434/v1/chat/completions", "GET", False),
            ("http://localhost:9/v1/chat/completions", "POST", False),
            ("https://models.lan/v1/completions", "POST", True),
            (CHAT, "POST", False),
        ):
            assert stamp(Request(url, method), run, run.address) is touched, url


def test_twice_is_once_and_the_last_speaker_counts() -> None:
    request = Request(CHAT, authorization="Bearer sk")
    with rollout(endpoint="http://e:1/v1", api_key="lr") as run:
        with scope("first"):
            stamp(request, run, _here())
            once = (str(request.url), dict(request.headers))
            stamp(request, run, _here())
            assert (str(request.url), dict(request.headers)) == once
        stamp(request, run, run.address)
    assert "lightning-agent" not in request.headers
    assert request.headers["lightning-origin-authorization"] == "Bearer sk"
    assert request.headers["lightning-origin"] == CHAT


def _here() -> Address:
    address = current_address()
    assert address is not None
    return address


@pytest.mark.usefixtures("client_patches")
def test_retries_of_the_sdk(server: RecordingServer) -> None:
    server.fail_next = 2
    client = openai.OpenAI(api_key="sk-own", max_retries=3)
    with rollout_at(server), scope("writer"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert len(server.requests) == 3
    for noted in server.requests:
        assert noted.headers["lightning-origin"] == CHAT
        assert noted.headers["lightning-origin-authorization"] == "Bearer sk-own"
        assert address_of(noted.headers).agent == "writer"
        assert noted.body == server.requests[0].body


@pytest.mark.usefixtures("client_patches")
def test_one_client_for_concurrent_rollouts(server: RecordingServer) -> None:
    client = openai.AsyncOpenAI(api_key="sk-own")
    runs: list[Run] = []

    async def one(name: str) -> None:
        with rollout_at(server) as run, scope(name):
            runs.append(run)
            for _ in range(3):
                await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}])

    async def main() -> None:
        async with client:
            await asyncio.gather(*(one(f"agent {i}") for i in range(4)))

    asyncio.run(main())
    assert len(server.requests) == 12
    for noted in server.requests:
        assert address_of(noted.headers).agent == noted.body["model"]
    assert {address_of(noted.headers).rollout for noted in server.requests} == {run.rollout for run in runs}


@pytest.mark.usefixtures("client_patches")
def test_a_synchronous_client_in_an_executor_with_a_copied_context(server: RecordingServer) -> None:
    client = openai.OpenAI(api_key="sk-own")

    def call() -> None:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

    with rollout_at(server), ThreadPoolExecutor(1) as pool, scope("writer"):
        pool.submit(contextvars.copy_context().run, call).result()
    assert address_of(server.requests[0].headers).agent == "writer"


@pytest.mark.usefixtures("client_patches")
def test_what_goes_wrong_is_counted_and_the_request_goes_out() -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    with rollout(endpoint="http://[not-a-url/v1", api_key="k") as run:
        client.post(CHAT, json={})
    assert run.counters["client.stamp"] == 1
    assert str(sent[0].url) == CHAT
