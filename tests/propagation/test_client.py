"""The headers and URLs of model requests: the caller's address, and routing."""

from __future__ import annotations

import asyncio
import contextvars
import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import httpx2
import openai
import pytest
import requests

from lightning_core import rollout
from lightning_core.capture import ActiveRollout, bind, current_address, outside_rollout, scope
from lightning_core.capture.address import Address
from lightning_core.capture.context import is_capturing
from lightning_core.capture.patching import Patches
from lightning_core.endpoint.forwarding.upstream import upstream_target
from lightning_core.errors import ConfigError, StrayCallError
from lightning_core.propagation.clients import install_client
from lightning_core.testing.recording_server import RecordingServer
from tests.program_runs import Program
from tests.propagation.requests_elsewhere import elsewhere

CHAT = "https://api.openai.com/v1/chat/completions"
STAMPS = {"traceparent", "lightning-agent", "lightning-origin", "lightning-origin-authorization", "lightning-signature"}


@pytest.fixture
def client_patches() -> Iterator[None]:
    patches = Patches(is_capturing)
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
            f"{CHAT}?a=b",
            json={"model": "gpt", "messages": []},
            auth=("user", "password"),
        )
    assert response.json()["choices"][0]["message"]["content"] == "ok"
    (noted,) = server.requests
    assert noted.url == f"{server.url}/v1/chat/completions?a=b"
    assert noted.body == {"model": "gpt", "messages": []}
    assert noted.headers["host"] == server.url.removeprefix("http://")
    assert noted.headers["authorization"] == "Bearer lr-key"
    assert noted.headers["lightning-origin"] == f"{CHAT}?a=b"
    assert noted.headers["lightning-origin-authorization"] == "Basic dXNlcjpwYXNzd29yZA=="
    assert address_of(noted.headers) == address
    assert (address_of(noted.headers).rollout, address_of(noted.headers).agent) == (run.rollout, "writer")


def test_async_and_streaming(library: Any, server: RecordingServer) -> None:
    async def main() -> tuple[str, str]:
        async with library.AsyncClient() as client:
            plain = await client.post(CHAT, json={"model": "gpt"})
            async with client.stream("POST", CHAT, json={"model": "gpt", "stream": True}) as response:
                return plain.text, "".join([line async for line in response.aiter_lines()])

    with rollout_at(server), scope("writer"):
        plain, streamed = asyncio.run(main())
        with library.Client() as client, client.stream("POST", CHAT, json={"model": "gpt", "stream": True}) as response:
            assert "[DONE]" in "".join(response.iter_lines())
    assert json.loads(plain)
    assert "[DONE]" in streamed
    assert [address_of(noted.headers).agent for noted in server.requests] == ["writer"] * 3


def test_everything_else_is_left_alone(library: Any, server: RecordingServer) -> None:
    """Requests outside a rollout, in one without endpoint, and deliberately outside."""
    client, url = library.Client(), f"{server.url}/v1/chat/completions"

    def call() -> None:
        client.post(url, json=BODY, headers={"authorization": "Bearer sk-own", "x-api-key": "k"})

    call()
    with rollout(), scope("writer"):
        call()
    with rollout(endpoint="http://127.0.0.1:9/v1", api_key="lr-key"), outside_rollout():
        call()
    first, *others = server.requests
    assert others == [first] * 2
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


BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("https://api.anthropic.com/v1/messages?beta=true", "/v1/messages?beta=true"),
        ("https://example.org/any/prefix/chat/completions/", "/v1/chat/completions"),
        (
            "https://my.openai.azure.com/openai/deployments/gpt/chat/completions?api-version=1",
            "/v1/chat/completions?api-version=1",
        ),
        ("http://localhost:11434/api/chat", "/v1/origin/api/chat"),
    ],
)
def test_the_endpoint_gets_its_own_path_and_the_providers_url(
    library: Any, server: RecordingServer, url: str, path: str
) -> None:
    with rollout_at(server):
        library.post(url, json=BODY, headers={"api-key": "sk"})
    (noted,) = server.requests
    assert noted.url == f"{server.url}{path}"
    assert noted.headers["lightning-origin"] == url
    other = path.startswith("/v1/origin/")  # forwarded with all its keys
    assert noted.headers.get("api-key") == ("sk" if other else None)
    assert noted.headers.get("lightning-origin-authorization") == (None if other else "api-key sk")


def test_a_key_of_google_in_the_query_is_in_no_url(library: Any, server: RecordingServer) -> None:
    url = "https://generativelanguage.googleapis.com/v1beta/models/g:streamGenerateContent"
    with rollout_at(server):
        library.post(f"{url}?alt=sse&key=secret", json={"contents": []})
    (noted,) = server.requests
    assert noted.url == f"{server.url}/v1/models/g:streamGenerateContent?alt=sse"
    assert noted.headers["lightning-origin"] == f"{url}?alt=sse"
    assert noted.headers["lightning-origin-authorization"] == "x-goog-api-key secret"


def test_ignored_hosts_and_other_requests_are_counted(library: Any, server: RecordingServer) -> None:
    chat = f"{server.url}/v1/chat/completions"
    client = library.Client()
    endpoint = "http://127.0.0.1:9/v1"
    with rollout(endpoint=endpoint, api_key="k", ignore_hosts=["127.0.0.1"]) as ignoring, scope("writer"):
        client.post(chat, json=BODY)
    with rollout(endpoint=endpoint, api_key="k") as run, scope("writer"):
        client.get(f"{server.url}/v1/models")
        client.post(f"{server.url}/v1/embeddings", json={"model": "m", "input": "hi"})
    host = httpx.URL(server.url).netloc.decode()
    assert elsewhere(ignoring) == {("writer", host, "ignored"): 1}
    assert elsewhere(run) == {("writer", host, "not a model call"): 2}
    assert not any(STAMPS & set(noted.headers) for noted in server.requests)


def test_a_request_can_be_sent_again(library: Any, server: RecordingServer) -> None:
    """The request is not changed: each rollout redirects its own copy, and outside it goes where it went."""
    request = library.Request("POST", f"{server.url}/own/chat/completions", json=BODY, headers={"x-api-key": "own"})
    before = (str(request.url), dict(request.headers))
    client = library.Client()
    with rollout(endpoint=f"{server.url}/endpoint", api_key="lr-key", ignore_hosts=[]), scope("writer"):
        client.send(request)
    client.send(request)
    assert (str(request.url), dict(request.headers)) == before
    assert server.requests[-1].url == f"{server.url}/own/chat/completions"
    assert server.requests[-1].headers["x-api-key"] == "own"
    assert not STAMPS & set(server.requests[-1].headers)


def test_an_iterator_is_sent_once(library: Any, server: RecordingServer) -> None:
    def parts() -> Iterator[bytes]:
        yield b'{"model": "m", '
        yield b'"messages": []}'

    with rollout_at(server), scope("writer"):
        library.Client().post(CHAT, content=parts(), headers={"content-type": "application/json"})
    (noted,) = server.requests
    assert noted.body == {"model": "m", "messages": []}
    assert address_of(noted.headers).agent == "writer"


def test_a_model_call_of_nobody_is_refused(library: Any, server: RecordingServer) -> None:
    client = library.Client()

    def call() -> None:
        client.post(f"{server.url}/v1/chat/completions", json=BODY)

    with rollout(endpoint="http://127.0.0.1:9/v1", api_key="k"), scope("writer"):
        late = bind(call)
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(StrayCallError, match=r"127\.0\.0\.1"):
                pool.submit(call).result()
            pool.submit(client.get, f"{server.url}/v1/models").result()
            with outside_rollout():
                call()
    with pytest.raises(StrayCallError, match="has ended"):
        late()
    with (
        rollout(endpoint="http://127.0.0.1:9/v1", api_key="k", ignore_hosts=["127.0.0.1"]),
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(call).result()
    assert [noted.url.partition("/v1")[2] for noted in server.requests] == [
        "/models",
        "/chat/completions",
        "/chat/completions",
    ]


def test_an_application_in_this_process_makes_model_calls(library: Any, server: RecordingServer) -> None:
    """A request to it is no model call, but the calls that it makes meanwhile are."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async with library.AsyncClient() as inner:
            await inner.post(CHAT, json=BODY)
            await inner.get(f"{server.url}/v1/models")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def main() -> None:
        async with library.AsyncClient(transport=library.ASGITransport(application)) as client:
            await client.get("http://application/")

    with rollout_at(server) as run, scope("writer"):
        asyncio.run(main())
    assert [address_of(noted.headers).agent for noted in server.requests] == ["writer"] * 2
    assert elsewhere(run) == {("writer", "application", "not a model call"): 1}


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
    runs: list[ActiveRollout] = []

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


def test_a_request_whose_routing_fails_is_refused_if_it_may_be_a_model_call(
    library: Any, server: RecordingServer
) -> None:
    client, url = library.Client(), f"{server.url}/v1/chat/completions"
    with rollout(endpoint="http://[not-a-url/v1", api_key="k", strict=False) as run:
        with pytest.raises(StrayCallError, match=f"a request to {server.url.removeprefix('http://')} .* was refused"):
            client.post(url, json=BODY)
        assert server.requests == []
        assert [run.counters[name] for name in ("client.stamp", "infrastructure")] == [1, 1]
        client.get(f"{server.url}/v1/models")
        with outside_rollout():
            client.post(url, json=BODY)
    assert [noted.url for noted in server.requests] == [f"{server.url}/v1/models", url]


def test_hosts_to_ignore_are_reached_although_routing_fails(library: Any, server: RecordingServer) -> None:
    with rollout(endpoint="http://[not-a-url/v1", api_key="k", strict=False, ignore_hosts=["127.0.0.1"]):
        library.post(f"{server.url}/v1/chat/completions", json=BODY)
    assert len(server.requests) == 1


@pytest.mark.parametrize("post", [httpx.post, requests.post])
def test_a_request_is_forwarded_with_the_headers_and_the_model_that_it_has(program: Program, post: Any) -> None:
    """Characters other than ASCII and values that are bytes arrive as the client sends them."""
    key, organization = "Bearer ü".encode(), "☃".encode()

    def solve(task: Any) -> float:
        headers = {"authorization": key, "openai-organization": organization}
        with scope("other"):
            body = {"messages": [{"role": "user", "content": "hi"}]}
            url = f"{program.provider.url}/chat/completions"
            post(url, json=body, headers=headers).raise_for_status()
        with scope("writer"):
            program.ask()
        return 1.0

    program.run(solve, agents={"train": ["writer"]})
    for request in program.provider.requests:
        assert request.headers["authorization"].encode("latin-1") == key
        assert request.headers["openai-organization"].encode("latin-1") == organization
        assert request.body == {"messages": [{"role": "user", "content": "hi"}]}
    assert len(program.provider.requests) == 2


def test_a_compressed_request_in_another_wire_format_is_forwarded_as_it_is(program: Program) -> None:
    data = gzip.compress(json.dumps({"model": "llama", "messages": [{"role": "user", "content": "hi"}]}).encode())

    def solve(task: Any) -> float:
        with scope("writer"):
            program.ask()
        with scope("other"):
            headers = {"content-encoding": "gzip"}
            httpx.post(f"{program.provider.url}/api/chat", content=data, headers=headers)
        return 1.0

    program.run(solve, agents={"train": ["writer"]})
    assert [request.data for request in program.provider.requests] == [data, data]
    assert {(e.kind, e.agent) for e in program.ledger()} == {("call", "writer"), ("call", "other")}


def test_a_key_that_no_header_can_contain_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "“sk-1”")
    with pytest.raises(ConfigError, match=r"'UPSTREAM_KEY' \(policy.upstream.api_key_env\) has characters other than"):
        upstream_target("http://localhost", "UPSTREAM_KEY", connections=1, timeout_seconds=1)
