"""HTTP client for upstream model servers, which answer agents that are not trained."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from lightning_core.dialects.dialect import EVENT_END, event_data
from lightning_core.endpoint.transport.api_key import read_api_key
from lightning_core.endpoint.transport.server_client import ServerClient
from lightning_core.errors import UpstreamError, UpstreamRefusal, describe, fold
from lightning_core.propagation.providers import GOOGLE_KEY, KEY_HEADERS, host_of, is_loopback, without_key

_PASSED_BACK = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")
"""Headers of an HTTP error that are passed through, because clients act on them."""
_LONGEST_END = 4
_JSON = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """The URL and credentials of a forwarded call."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    credentials: str = "no key"
    """Description of the key's owner, for display."""
    advice: str = ""
    """A sentence for the error if the server is not reached."""

    @property
    def shown(self) -> str:
        """The URL for messages: without query and user, which may contain credentials."""
        url = urlsplit(self.url)
        return url._replace(netloc=host_of(url), query="", fragment="").geturl()


def origin_remote(url: str, credentials: str | None) -> Remote:
    """The original provider of a redirected call.

    ``credentials``: an ``Authorization`` value, or the name of another header and its value.
    """
    url, key = without_key(url)
    if credentials is None:
        return Remote(url=url) if key is None else Remote(url=url, headers={GOOGLE_KEY: key}, credentials="your key")
    name, _, value = credentials.partition(" ")
    return Remote(
        url=url,
        headers={name: value} if name in KEY_HEADERS else {"authorization": credentials},
        credentials="your key",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamServer:
    """The server under ``policy.upstream``."""

    base_url: str
    """The URL before the path of a wire format, such as ``https://api.openai.com/v1``."""
    api_key: str | None = field(default=None, repr=False)
    connections: int = 100
    """Most calls to it at the same time; further ones wait."""
    timeout_seconds: float = 120.0
    """Longest time in which it sends nothing."""

    def remote(self, path: str, key_header: str) -> Remote:
        """The URL and credentials of a call to ``path``, with the key in ``key_header``."""
        url = f"{self.base_url.rstrip('/')}{path}"
        if self.api_key is None:
            return Remote(url=url)
        value = f"Bearer {self.api_key}" if key_header == "authorization" else self.api_key
        return Remote(url=url, headers={key_header: value}, credentials="the key of policy.upstream")


def upstream_target(
    base_url: str, api_key_env: str | None, *, connections: int, timeout_seconds: float
) -> UpstreamServer:
    """The configured upstream.

    Raises `ConfigError` as `read_api_key` does.
    """
    key = read_api_key(api_key_env, "policy.upstream.api_key_env")
    return UpstreamServer(base_url=base_url, api_key=key, connections=connections, timeout_seconds=timeout_seconds)


def with_headers(remote: Remote, headers: Mapping[str, str]) -> Remote:
    """``remote`` with additional ``headers``."""
    return replace(remote, headers={**headers, **remote.headers})


class UpstreamClient:
    """An HTTP client for upstream model servers, with the limits of ``server`` or, without one, the defaults."""

    def __init__(self, server: UpstreamServer | None = None) -> None:
        limits = server or UpstreamServer(base_url="")
        self._advice = "" if server is None else ", or raise policy.upstream.timeout_seconds"
        self._timeout_seconds = limits.timeout_seconds
        self._client = ServerClient(
            # A call that waits for a connection is in progress, so the wait is not time of its agent.
            timeout=httpx.Timeout(limits.timeout_seconds, pool=None),
            connections=limits.connections,
            idle=limits.connections,
            # A server on this machine is not reached through the proxies of the environment.
            trust_env=not is_loopback(urlsplit(limits.base_url).hostname or ""),
        )

    async def complete(self, remote: Remote, body: bytes) -> bytes:
        """Forward a request, as JSON, without streaming. Returns the response.

        Raises `UpstreamError` if there is none, `UpstreamRefusal` for HTTP errors.
        """
        try:
            response = await self._client.post(remote.url, content=body, headers=[_JSON, *_raw(remote.headers)])
        except httpx.HTTPError as error:
            raise self._unreachable(remote, error) from error
        if response.status_code != 200:
            raise _refusal(remote, response)
        return response.content

    async def stream(self, remote: Remote, body: bytes) -> AsyncGenerator[bytes]:
        """Forward a streamed request, as JSON. Yields each event."""
        headers = [_JSON, *_raw(remote.headers)]
        try:
            async with self._client.stream("POST", remote.url, content=body, headers=headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(remote, response)
                buffer, start, searched = bytearray(), 0, 0
                async for part in response.aiter_bytes():
                    buffer += part
                    while end := EVENT_END.search(buffer, max(start, searched - _LONGEST_END)):
                        event, start = bytes(buffer[start : end.end()]), end.end()
                        yield event
                    del buffer[:start]
                    start, searched = 0, len(buffer)
                if buffer.strip():
                    yield bytes(buffer)
        except httpx.HTTPError as error:
            raise self._unreachable(remote, error) from error

    async def send(self, remote: Remote, headers: Mapping[str, str], data: bytes) -> httpx.Response:
        """Forward a request with exactly these ``headers`` and bytes. Returns the response as soon as it starts.

        Raises `UpstreamError` without a response.
        """
        try:
            return await self._client.send(
                httpx.Request("POST", remote.url, headers=_raw(headers), content=data), stream=True
            )
        except httpx.HTTPError as error:
            raise self._unreachable(remote, error) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _unreachable(self, remote: Remote, error: Exception) -> UpstreamError:
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            problem = (
                f"{remote.shown} did not answer in time: {type(error).__name__} after {self._timeout_seconds:g} s. "
                f"Lower rollouts.concurrency{self._advice}"
            )
        else:
            advice = self._advice if isinstance(error, httpx.ConnectTimeout) else ""
            problem = (
                f"could not reach {remote.shown}: {describe(error)}. Check that the model server is running{advice}"
            )
        return UpstreamError(f"{problem}. {remote.advice}" if remote.advice else problem)


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """``headers`` as bytes. A request's headers were decoded as Latin-1, so they are forwarded unchanged."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def check_status(remote: Remote, response: httpx.Response) -> None:
    """Raise `UpstreamRefusal` for HTTP errors; the body is not read."""
    if response.status_code >= 400:
        raise UpstreamRefusal(_refused(remote, response.status_code), status=response.status_code)


def _refused(remote: Remote, status: int, text: str = "") -> str:
    """The message for an HTTP error, with advice if every attempt would fail."""
    if status in (401, 402, 403):
        advice = f". Check the credentials for {host_of(urlsplit(remote.url))} (sent: {remote.credentials})"
    elif status in (404, 405, 410):
        advice = ". Check the URL, and that the server has this model"
    else:
        advice = ""
    return f"{remote.shown} returned status {status}{text}{advice}"


def _refusal(remote: Remote, response: httpx.Response) -> UpstreamRefusal:
    return UpstreamRefusal(
        _refused(remote, response.status_code, f": {fold(response.text, 240)}"),
        status=response.status_code,
        body=response.content,
        headers={name: response.headers[name] for name in _PASSED_BACK if name in response.headers},
    )


def read_event(remote: Remote, event: bytes) -> Mapping[str, Any] | None:
    """The JSON of a server-sent event; None for comments and ``[DONE]``."""
    data = event_data(event)
    return None if data in (b"", b"[DONE]") else read_answer(remote, data)


def read_answer(remote: Remote, data: bytes) -> Mapping[str, Any]:
    """The JSON of a response. Raises `UpstreamError` if it is no object."""
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UpstreamError(f"{remote.shown} returned {data[:300]!r}; expected a JSON object")
    return value
