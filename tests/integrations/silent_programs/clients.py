"""Programs that differ in how their request is sent: clients, hosts, paths and wire formats."""

from __future__ import annotations

import gzip
import http.client
import json
import urllib.request
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import requests
import urllib3

from tests.integrations.silent_programs.scenario import WRITER, Scenario, as_writer

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": WRITER}]
CHAT: dict[str, Any] = {"model": "gpt", "messages": MESSAGES}
JSON = {"content-type": "application/json"}
_made: dict[str, httpx.Request] = {}


@as_writer
def urllib_opener(url: str) -> None:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(CHAT).encode(), JSON)
    with urllib.request.build_opener().open(request) as response:
        assert json.load(response)["choices"]


@as_writer
def http_client_in_parts(url: str) -> None:
    """Line by line, as botocore and small clients do."""
    body = json.dumps(CHAT).encode()
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.putrequest("POST", "/v1/chat/completions")
    for name, value in (JSON | {"content-length": str(len(body))}).items():
        connection.putheader(name, value)
    connection.endheaders(body)
    assert json.load(connection.getresponse())["choices"]
    connection.close()


@as_writer
def requests_session_with_auth(url: str) -> None:
    with requests.Session() as session:
        session.auth = ("someone", "secret")
        session.headers["api-key"] = "own"
        session.post(f"{url}/v1/chat/completions", json=CHAT).raise_for_status()


@as_writer
async def aiohttp_session(url: str) -> None:
    async with (
        aiohttp.ClientSession(f"{url}/v1/", headers={"authorization": "Bearer own"}) as session,
        session.post("chat/completions", json=CHAT) as response,
    ):
        response.raise_for_status()


@as_writer
def urllib3_pool(url: str) -> None:
    with urllib3.PoolManager() as pool:
        assert pool.request("POST", f"{url}/v1/chat/completions", json=CHAT).status == 200


@as_writer
def reused_request(url: str) -> None:
    """One request object for all rollouts."""
    with httpx.Client() as client:
        request = _made.setdefault(url, client.build_request("POST", f"{url}/v1/chat/completions", json=CHAT))
        client.send(request).raise_for_status()


@as_writer
def streamed_body(url: str) -> None:
    def parts() -> Iterator[bytes]:
        yield json.dumps(CHAT).encode()

    httpx.post(f"{url}/v1/chat/completions", content=parts(), headers=JSON).raise_for_status()


def post(path: str, body: Mapping[str, Any] | bytes = MappingProxyType(CHAT), **headers: str) -> Any:
    """A program that posts ``body`` to ``path`` of its provider."""

    @as_writer
    def program(url: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(dict(body))
        httpx.post(f"{url}{path}", content=content, headers=JSON | headers).raise_for_status()

    return program


def post_to_localhost(path: str) -> Any:
    """A program whose model server is at ``http://localhost:PORT``."""

    @as_writer
    def program(url: str) -> None:
        httpx.post(f"http://localhost:{urlsplit(url).port}{path}", json=CHAT).raise_for_status()

    return program


_PARTS = [{"role": "user", "parts": [{"text": WRITER}]}]
_NO_MODEL = {"messages": MESSAGES}

CLIENTS: dict[str, Scenario] = {
    "urllib": Scenario(urllib_opener),
    "http.client in parts": Scenario(http_client_in_parts),
    "requests session with auth": Scenario(requests_session_with_auth),
    "aiohttp": Scenario(aiohttp_session),
    "urllib3": Scenario(urllib3_pool),
    "a request object that is sent again": Scenario(reused_request),
    "a body that is an iterator": Scenario(streamed_body),
    "a local model server": Scenario(post_to_localhost("/v1/chat/completions")),
    "a trailing slash": Scenario(post("/v1/chat/completions/")),
    "a path without a version": Scenario(post("/inference/chat/completions")),
    "another version": Scenario(post("/api/v3/chat/completions")),
    "Azure's path, without a model": Scenario(post("/openai/deployments/gpt/chat/completions?api-version=1", _NO_MODEL)),
    "a compressed body": Scenario(post("/v1/chat/completions", gzip.compress(json.dumps(CHAT).encode()), **{"content-encoding": "gzip"})),
    "Responses without a model": Scenario(post("/v1/responses", {"input": WRITER})),
    "Responses": Scenario(post("/v1/responses", {"model": "gpt", "input": WRITER})),
    "Anthropic's Messages": Scenario(post("/v1/messages", CHAT | {"max_tokens": 64}, **{"anthropic-version": "2023-06-01"})),
    "Gemini's generateContent": Scenario(post("/v1beta/models/gemini:generateContent", {"contents": _PARTS}, **{"x-goog-api-key": "own"})),
}  # fmt: skip

NATIVE = post_to_localhost("/api/chat")
"""Ollama's own wire format, which the endpoint does not sample."""
