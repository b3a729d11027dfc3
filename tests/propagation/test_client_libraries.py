"""Each HTTP client library: inside a rollout the stamp overrides headers that the library adds itself."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anthropic
import httpx
import httpx2
import pytest
import requests
import urllib3

from lightning_core import load_config, rollout
from lightning_core.capture import ActiveRollout, current_rollout, scope
from lightning_core.capture.address import Address
from lightning_core.capture.patching import Patches
from lightning_core.errors import StrayCallError
from lightning_core.propagation.clients import install_client
from lightning_core.testing.recording_server import RecordedRequest, RecordingServer

CHAT = "https://api.openai.com/v1/chat/completions"
BODY = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def client_patches() -> Iterator[None]:
    patches = Patches(lambda: current_rollout() is not None)
    install_client(patches)
    yield
    patches.undo()


@pytest.fixture
def netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for every host."""
    path = tmp_path / "netrc"
    path.write_text("default login someone password secret\n")
    path.chmod(0o600)
    monkeypatch.setenv("NETRC", str(path))


def rollout_at(server: RecordingServer, **more: Any) -> rollout:
    return rollout(endpoint=f"{server.url}/v1", api_key="lr-key", **more)


def assert_stamped(noted: RecordedRequest, agent: str, own_key: str | None = "Bearer sk-own") -> None:
    address = Address.from_headers(noted.headers)
    assert address is not None
    assert address.agent == agent
    assert noted.url.endswith("/v1/chat/completions")
    assert noted.headers["authorization"] == "Bearer lr-key"
    assert noted.headers["lightning-origin"] == CHAT
    assert noted.headers.get("lightning-origin-authorization") == own_key
    assert not {"x-api-key", "api-key"} & set(noted.headers)
    assert noted.body == BODY


async def with_session(use: Callable[[aiohttp.ClientSession], Awaitable[Any]], **options: Any) -> Any:
    async with aiohttp.ClientSession(**options) as session:
        return await use(session)


def aiohttp_post(url: str, **options: Any) -> None:
    async def post(session: aiohttp.ClientSession) -> None:
        async with session.post(url, json=BODY, headers={"authorization": "Bearer sk-own"}, **options) as response:
            await response.read()

    asyncio.run(with_session(post))


def requests_post(url: str, **options: Any) -> None:
    requests.post(url, json=BODY, headers={"authorization": "Bearer sk-own"}, **options)


def httpx_post(url: str) -> None:
    httpx.post(url, json=BODY, headers={"authorization": "Bearer sk-own"}, follow_redirects=True)


def httpx2_post(url: str) -> None:
    httpx2.post(url, json=BODY, headers={"authorization": "Bearer sk-own"}, follow_redirects=True)


def urllib3_post(url: str) -> None:
    manager = urllib3.PoolManager()
    with suppress(urllib3.exceptions.MaxRetryError):  # too many redirects
        manager.request("POST", url, json=BODY, headers={"Authorization": "Bearer sk-own"})


def urllib_post(url: str) -> None:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sk-own"}
    request = urllib.request.Request(url, json.dumps(BODY).encode(), headers)
    opener = urllib.request.build_opener()  # `urlopen` keeps the proxies of its first call
    with suppress(urllib.error.HTTPError), opener.open(request) as response:
        response.read()


def http_client_post(url: str) -> None:
    target = urlsplit(url)
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    connection = kind(target.netloc)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sk-own"}
    connection.request("POST", url.partition(target.netloc)[2], json.dumps(BODY), headers)
    connection.getresponse().read()
    connection.close()


USES_PROXIES_OF_THE_ENVIRONMENT = (httpx_post, httpx2_post, requests_post, urllib_post)
"""aiohttp does only if a session enables it."""

every_library = pytest.mark.parametrize(
    "post", [httpx_post, httpx2_post, requests_post, aiohttp_post, urllib3_post, urllib_post, http_client_post]
)


@every_library
def test_redirected_inside_a_rollout_and_untouched_outside(
    post: Callable[[str], None], server: RecordingServer
) -> None:
    elsewhere = f"{server.url}/v1/chat/completions?a=b"
    with rollout_at(server), scope("schreiber für Köln"):
        post(CHAT)
    post(elsewhere)
    with rollout(), scope("writer"):
        post(elsewhere)
    with rollout(endpoint="http://127.0.0.1:9/v1", api_key="lr-key", ignore_hosts=["127.0.0.1"]), scope("writer"):
        post(elsewhere)
    stamped, *others = server.requests
    assert_stamped(stamped, "schreiber für Köln")
    patches = Patches(lambda: False)
    install_client(patches)
    post(elsewhere)
    patches.undo()
    assert others == [server.requests[-1]] * 3
    assert others[0].headers["authorization"] == "Bearer sk-own"


@every_library
def test_a_request_whose_routing_fails_is_refused(post: Callable[[str], None], server: RecordingServer) -> None:
    with rollout(endpoint="http://[not-a-url/v1", api_key="k", strict=False) as run, pytest.raises(StrayCallError):
        post(f"{server.url}/v1/chat/completions")
    assert server.requests == []
    assert run.counters["client.stamp"] == 1


@pytest.mark.parametrize(
    ("client", "part", "post"),
    [
        (aiohttp.ClientSession, "_prepare_headers", aiohttp_post),
        (urllib3.HTTPConnectionPool, "urlopen", urllib3_post),
        (http.client.HTTPConnection, "_buffer", http_client_post),
    ],
)
def test_a_request_that_cannot_be_read_is_refused(
    client: Any, part: str, post: Callable[[str], None], server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private part of the client that is different, as in a new version of it."""
    if part == "_buffer":
        monkeypatch.setattr(client, "_output", lambda self, line: self._buffer.append(line.split()[0]))
    elif part == "urlopen":
        monkeypatch.setattr(inspect, "signature", lambda function: None)
    else:
        monkeypatch.delattr(client, part)
    with rollout_at(server), scope("writer"), pytest.raises(StrayCallError):
        post(f"{server.url}/v1/chat/completions")
    assert server.requests == []


def test_urllib3_keeps_the_settings_of_the_pool(server: RecordingServer) -> None:
    server.fail_next = 1
    retries = urllib3.Retry(total=1, status_forcelist=[500], allowed_methods=None)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        rollout(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}/v1", api_key="lr-key") as run,
    ):
        timer = threading.Timer(20, silent.close)  # the test fails rather than hangs
        timer.start()
        with pytest.raises(urllib3.exceptions.ReadTimeoutError):
            urllib3.PoolManager(timeout=0.2, retries=False).request("POST", CHAT, json=BODY)
        timer.cancel()
        assert (
            f"by no agent, to {urlsplit(CHAT).netloc}). Raise the client's time-out, or lower" in run.infrastructure[0]
        )
    with rollout_at(server):
        assert urllib3.PoolManager(retries=retries).request("POST", CHAT, json=BODY).status == 200
    assert len(server.requests) == 2


class Redirecting(BaseHTTPRequestHandler):
    """Redirects every request to the server's ``target``, also to another host."""

    def do_POST(self) -> None:
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(307)
        self.send_header("location", self.server.target)  # type: ignore[attr-defined]
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def redirecting(target: str) -> Generator[tuple[str, list[str]]]:
    with HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        server.target, server.paths = target, []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.paths  # type: ignore[attr-defined]
        finally:
            server.shutdown()
            thread.join()


@every_library
def test_proxies_are_bypassed_for_an_endpoint_on_this_machine(
    post: Callable[[str], None], server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with redirecting(f"{server.url}/v1/chat/completions") as (proxy, paths):
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        with rollout_at(server, ignore_hosts=["models.invalid"]), scope("writer"):
            post(CHAT)
            assert paths == []
            if post in USES_PROXIES_OF_THE_ENVIRONMENT:
                post("http://models.invalid/v1/chat/completions")
                assert paths[0] == "http://models.invalid/v1/chat/completions"
    assert_stamped(server.requests[0], "writer")


@every_library
def test_an_http_redirect_takes_no_key_along(post: Callable[[str], None], server: RecordingServer) -> None:
    target = f"{server.url}/v1/chat/completions"
    with redirecting(target) as (url, _):
        with (
            rollout(endpoint=f"{url}/v1", api_key="lr-key"),
            scope("writer"),
            suppress(httpx.TooManyRedirects, httpx2.TooManyRedirects, requests.TooManyRedirects),
        ):
            post(CHAT)  # followed to the endpoint, which redirects again
        assert server.requests == []
        with rollout(endpoint="http://127.0.0.1:9/v1", api_key="lr-key", ignore_hosts=["127.0.0.1"]), scope("writer"):
            post(f"{url}/v1/chat/completions")
    # urllib follows no redirect of a POST, and http.client none at all.
    assert [noted.url for noted in server.requests] == ([] if post in (urllib_post, http_client_post) else [target])
    assert "lr-key" not in str(server.requests)


@pytest.mark.usefixtures("netrc")
def test_aiohttp_sessions_add_nothing_of_their_own(server: RecordingServer) -> None:
    async def post(session: aiohttp.ClientSession) -> None:
        await session.post("chat/completions", json=BODY)
        await session.post(f"{server.url}/v1/models")

    async def main() -> None:
        keys = {"X-Api-Key": "sk-own"}
        await with_session(post, base_url="https://api.openai.com/v1/", headers=keys, trust_env=True)
        await with_session(post, base_url="https://api.openai.com/v1/", trust_env=True, proxy="http://127.0.0.1:9")

    with rollout_at(server), scope("writer"):
        asyncio.run(main())
    with_keys, to_endpoint, without, again = server.requests
    assert_stamped(with_keys, "writer", own_key="x-api-key sk-own")
    assert_stamped(without, "writer", own_key=None)
    for noted in (to_endpoint, again):
        assert noted.headers["authorization"] == "Bearer lr-key"
        assert not {"x-api-key", "lightning-origin"} & set(noted.headers)


@pytest.mark.filterwarnings("ignore:The 'auth' parameter is deprecated")
def test_aiohttp_authentication_gives_way(server: RecordingServer) -> None:
    basic = aiohttp.BasicAuth("someone", "secret")

    async def post(session: aiohttp.ClientSession) -> None:
        await session.post(CHAT, json=BODY)

    async def post_with_auth(session: aiohttp.ClientSession) -> None:
        await session.post(CHAT, json=BODY, auth=basic)

    with rollout_at(server), scope("writer"):
        asyncio.run(with_session(post, auth=basic))
        asyncio.run(with_session(post_with_auth))
    for noted in server.requests:
        assert_stamped(noted, "writer", own_key=None)
    assert len(server.requests) == 2


def test_one_aiohttp_session_for_concurrent_rollouts_streaming(server: RecordingServer) -> None:
    runs: list[ActiveRollout] = []

    async def one(session: aiohttp.ClientSession, name: str) -> None:
        with rollout_at(server) as run, scope(name):
            runs.append(run)
            for _ in range(3):
                async with session.post(
                    CHAT, params={"a": "b"}, json={"model": "gpt", "agent": name, "stream": True}
                ) as response:
                    assert b"[DONE]" in b"".join([line async for line in response.content])

    async def all_of_them(session: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(one(session, f"agent {i}") for i in range(4)))
        assert not session.closed
        async with session.get(f"{server.url}/plain") as response:
            assert response.ok

    asyncio.run(with_session(all_of_them, trace_configs=[aiohttp.TraceConfig()]))
    *stamped, plain = server.requests
    assert len(stamped) == 12
    for noted in stamped:
        address = Address.from_headers(noted.headers)
        assert address is not None
        assert address.agent == noted.body["agent"]
        assert noted.headers["lightning-origin"] == f"{CHAT}?a=b"
        assert noted.url.endswith("/v1/chat/completions?a=b")
    assert {Address.from_headers(n.headers).rollout for n in stamped} == {run.rollout for run in runs}  # type: ignore[union-attr]
    assert "authorization" not in plain.headers


def test_aiohttp_sends_the_same_as_without_us(server: RecordingServer) -> None:
    async def post(session: aiohttp.ClientSession) -> None:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.post(CHAT, json=BODY)
        with pytest.raises(aiohttp.InvalidURL):
            await session.post("http:///", json=BODY)
        await session.close()
        with pytest.raises(RuntimeError, match="Session is closed"):
            await session.post(CHAT, json=BODY)

    with rollout(endpoint="http://127.0.0.1:9/v1", api_key="lr-key"):
        asyncio.run(with_session(post))


@pytest.mark.usefixtures("netrc")
def test_requests_authentication_gives_way(server: RecordingServer) -> None:
    session = requests.Session()
    session.auth = ("someone", "secret")
    with rollout_at(server), scope("writer"):
        requests.post(CHAT, json=BODY)
        session.post(CHAT, json=BODY)
    for noted in server.requests:
        assert_stamped(noted, "writer", own_key=noted.headers["lightning-origin-authorization"])
        assert noted.headers["lightning-origin-authorization"].startswith("Basic ")


def test_a_prepared_request_can_be_sent_again_elsewhere(server: RecordingServer) -> None:
    session = requests.Session()
    prepared = session.prepare_request(requests.Request("POST", CHAT, json=BODY))
    before = (prepared.url, dict(prepared.headers))
    for agent in ("writer", "reader"):
        with rollout_at(server), scope(agent):
            session.send(prepared)
    assert (prepared.url, dict(prepared.headers)) == before
    for noted, agent in zip(server.requests, ("writer", "reader"), strict=True):
        assert_stamped(noted, agent, own_key=None)


def test_requests_streaming(server: RecordingServer) -> None:
    session = requests.Session()
    with (
        rollout_at(server),
        scope("writer"),
        session.post(CHAT, json={"model": "gpt", "stream": True}, stream=True) as response,
    ):
        assert b"data: [DONE]" in list(response.iter_lines())
    assert server.requests[0].headers["authorization"] == "Bearer lr-key"


def test_the_anthropic_sdk(server: RecordingServer) -> None:
    client = anthropic.Anthropic(api_key="sk-ant")
    with rollout_at(server), scope("writer"):
        client.messages.create(model="claude", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    (noted,) = server.requests
    assert noted.url == f"{server.url}/v1/messages"
    assert noted.headers["authorization"] == "Bearer lr-key"
    assert noted.headers["lightning-origin"] == "https://api.anthropic.com/v1/messages"
    assert noted.headers["lightning-origin-authorization"] in ("Bearer sk-ant", "x-api-key sk-ant")
    assert "x-api-key" not in noted.headers


def test_the_configured_hosts_to_ignore() -> None:
    config = load_config({"policy": {"model": "m"}, "rollouts": {"ignore_hosts": ["models.lan"]}})
    assert config.rollouts.ignore_hosts == ("models.lan",)
