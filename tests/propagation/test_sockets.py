"""Connections that leave a rollout without a patched client."""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import requests
import urllib3

from lightning_core.capture import rollout, scope
from lightning_core.capture.context import is_capturing
from lightning_core.capture.patching import Patches
from lightning_core.propagation.clients import install_client
from lightning_core.propagation.sockets import install_sockets
from lightning_core.testing.recording_server import RecordingServer
from tests.propagation.requests_elsewhere import elsewhere

ENDPOINT = "http://127.0.0.1:9/v1"


def connection_to(server: RecordingServer) -> tuple[str, str, str]:
    return "writer", f"localhost:{port_of(server)}", "connection by other code"


@pytest.fixture(autouse=True)
def patches() -> Iterator[Patches]:
    patches = Patches(is_capturing)
    install_client(patches)
    install_sockets(patches)
    yield patches
    patches.undo()


def port_of(server: RecordingServer) -> int:
    return int(server.url.rpartition(":")[2])


def connect(server: RecordingServer) -> None:
    socket.create_connection(("localhost", port_of(server))).close()


def test_a_connection_of_other_code_is_counted_by_host(server: RecordingServer) -> None:
    async def connect_async() -> None:
        _, writer = await asyncio.open_connection("localhost", port_of(server))
        writer.close()

    connect(server)
    with rollout(endpoint=ENDPOINT) as run, scope("writer"):
        connect(server)
        asyncio.run(connect_async())
        thread = threading.Thread(target=connect, args=(server,))
        thread.start()
        thread.join()
    connect(server)
    # The thread has no scope without the patches of `threads`. A name may have addresses that refuse; each is tried.
    assert set(elsewhere(run)) == {connection_to(server)}
    assert elsewhere(run)[connection_to(server)] >= 2


def test_nothing_is_counted_without_patches(server: RecordingServer, patches: Patches) -> None:
    patches.undo()
    with rollout(endpoint=ENDPOINT) as run, scope("writer"):
        connect(server)
    assert elsewhere(run) == {}


def get_httpx(url: str) -> None:
    httpx.get(url)


def get_httpx_async(url: str) -> None:
    async def main() -> None:
        async with httpx.AsyncClient() as client:
            await client.get(url)

    asyncio.run(main())


def get_aiohttp(url: str) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            await response.read()

    asyncio.run(main())


def get_requests(url: str) -> None:
    requests.get(url)


def get_urllib3(url: str) -> None:
    urllib3.PoolManager().request("GET", url)


def get_urllib(url: str) -> None:
    with urllib.request.urlopen(url) as response:
        response.read()


@pytest.mark.parametrize("get", [get_httpx, get_httpx_async, get_aiohttp, get_requests, get_urllib3, get_urllib])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_request_of_a_patched_client_is_counted_once(get: Any, host: str, server: RecordingServer) -> None:
    with rollout(endpoint=ENDPOINT) as run, scope("writer"):
        get(f"http://{host}:{port_of(server)}/v1/models")
    assert elsewhere(run) == {("writer", f"{host}:{port_of(server)}", "not a model call"): 1}


def test_requests_to_the_endpoint_are_not_counted(server: RecordingServer) -> None:
    body = {"model": "m", "messages": []}
    with rollout(endpoint=f"{server.url}/v1", api_key="k") as run, scope("writer"):
        requests.post("https://api.example.org/v1/chat/completions", json=body)
        httpx.post("https://api.example.org/v1/chat/completions", json=body)
        connect(server)
    assert elsewhere(run) == {}
    assert len(server.requests) == 2


def test_a_connection_is_used_again_for_its_own_host(server: RecordingServer) -> None:
    """After a model call, the next request goes where the connection was made for."""
    connection = http.client.HTTPConnection("localhost", port_of(server))
    headers = {"Content-Type": "application/json"}

    def send(path: str, body: str | None) -> None:
        connection.request("POST" if body else "GET", path, body, headers)
        connection.getresponse().read()

    with rollout(endpoint=f"{server.url}/endpoint", api_key="k") as run, scope("writer"):
        send("/v1/chat/completions", '{"model": "m", "messages": []}')
        send("/v1/models", None)
        send("/v1/chat/completions", '{"model": "m", "messages": []}')
    send("/v1/chat/completions", '{"model": "m", "messages": []}')
    paths = [
        noted.url.removeprefix(server.url).removeprefix(f"http://localhost:{port_of(server)}")
        for noted in server.requests
    ]
    assert paths == ["/endpoint/chat/completions", "/v1/models", "/endpoint/chat/completions", "/v1/chat/completions"]
    assert "authorization" not in server.requests[-1].headers
    assert elsewhere(run) == {("writer", f"localhost:{port_of(server)}", "not a model call"): 1}


def test_low_level_use_of_a_connection(server: RecordingServer) -> None:
    body = b'{"model": "m", "messages": []}'
    with rollout(endpoint=f"{server.url}/endpoint", api_key="k") as run, scope("writer"):
        for path in ("/v1/chat/completions", "/api/chat"):
            connection = http.client.HTTPConnection("localhost", port_of(server))
            connection.putrequest("POST", path)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            connection.send(body)  # not seen: only the first path says that this is a model call
            connection.getresponse().read()
            connection.close()
    first, second = server.requests
    assert first.url == f"{server.url}/endpoint/chat/completions"
    assert second.url.endswith("/api/chat")
    assert first.body == second.body == {"model": "m", "messages": []}
    assert elsewhere(run) == {("writer", f"localhost:{port_of(server)}", "body not readable"): 1}


def test_unix_sockets_are_counted_but_not_those_of_multiprocessing(tmp_path: Path) -> None:
    path = str(tmp_path / "database")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with rollout(endpoint=ENDPOINT) as run, scope("writer"):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
            with multiprocessing.get_context("fork").Manager() as manager:
                manager.list([1]).append(2)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
                datagrams.connect(("127.0.0.1", 9))
    assert elsewhere(run) == {("writer", f"unix:{path}", "connection by other code"): 1}
