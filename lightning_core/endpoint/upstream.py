"""Models that somebody else serves: calls of agents that are not trained are passed on to them, and recorded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from lightning_core.errors import ConfigError, UpstreamError, UpstreamRefusal
from lightning_core.trace import describe

_PASSED_BACK = ("content-type", "retry-after", "retry-after-ms", "x-should-retry")
"""Headers of an HTTP error that clients act on."""
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a call goes, and with which credentials."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


def origin_target(url: str, credentials: str | None) -> Target:
    """The provider that a redirected call was on its way to. ``credentials`` as the client stamp wrote them: an ``Authorization``
    value, or the name of another header and its value."""
    if credentials is None:
        return Target(url=url)
    name, _, value = credentials.partition(" ")
    return Target(
        url=url, headers={name: value} if name in ("x-api-key", "api-key") else {"authorization": credentials}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamServer:
    """The server that the configuration names for models that are not served here."""

    base_url: str
    """Such as ``https://api.openai.com/v1``: what stands before a wire format's path."""
    api_key: str | None = field(default=None, repr=False)

    def target(self, path: str, key_header: str) -> Target:
        """Where a call goes that was sent to ``path`` here, its key in the header that belongs to the wire format."""
        url = f"{self.base_url.rstrip('/')}{path}"
        if self.api_key is None:
            return Target(url=url)
        value = f"Bearer {self.api_key}" if key_header == "authorization" else self.api_key
        return Target(url=url, headers={key_header: value})


def upstream_target(base_url: str, api_key_env: str | None) -> UpstreamServer:
    """The configured upstream. Raises `ConfigError` if the environment variable with its key is not set."""
    key = None
    if api_key_env:
        key = os.environ.get(api_key_env)
        if not key:
            raise ConfigError(
                f"policy.upstream.api_key_env names {api_key_env!r}, but that environment variable is not set"
            )
    return UpstreamServer(base_url=base_url, api_key=key)


def with_headers(target: Target, headers: Mapping[str, str]) -> Target:
    """``target``, to be called with ``headers`` too."""
    return replace(target, headers={**headers, **target.headers})


class Upstream:
    """An HTTP client for other people's model servers."""

    def __init__(self, timeout_seconds: float = 120.0) -> None:
        self._client = httpx.AsyncClient(timeout=timeout_seconds)

    async def complete(self, target: Target, body: Mapping[str, Any]) -> tuple[bytes, Mapping[str, Any]]:
        """Pass on a request without streaming: the answer as it came, and as JSON.

        Raises `UpstreamError` if the server is not there or gives no answer, `UpstreamRefusal` if that is an HTTP error.
        """
        try:
            response = await self._client.post(target.url, json=body, headers=target.headers)
        except httpx.HTTPError as error:
            raise UpstreamError(_unreachable(target, error)) from error
        if response.status_code != 200:
            raise _refusal(target, response)
        return response.content, _load(target, response.content)

    async def stream(
        self, target: Target, body: Mapping[str, Any]
    ) -> AsyncGenerator[tuple[bytes, Mapping[str, Any] | None]]:
        """Pass on a streamed request: each event's bytes as they came, with the JSON in it, if any."""
        try:
            async with self._client.stream("POST", target.url, json=body, headers=target.headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(target, response)
                buffer = b""
                async for part in response.aiter_bytes():
                    buffer += part
                    while end := _EVENT_END.search(buffer):
                        event, buffer = buffer[: end.end()], buffer[end.end() :]
                        yield event, _data(target, event)
                if buffer.strip():
                    yield buffer, _data(target, buffer)
        except httpx.HTTPError as error:
            raise UpstreamError(_unreachable(target, error)) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _refusal(target: Target, response: httpx.Response) -> UpstreamRefusal:
    return UpstreamRefusal(
        f"{target.url} answered {response.status_code}: {response.text[:300]}",
        status=response.status_code,
        body=response.content,
        headers={name: response.headers[name] for name in _PASSED_BACK if name in response.headers},
    )


def _data(target: Target, event: bytes) -> Mapping[str, Any] | None:
    """The JSON of a server-sent event; None for a comment and for the closing mark."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(lines)
    return None if data in (b"", b"[DONE]") else _load(target, data)


def _load(target: Target, data: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UpstreamError(f"{target.url} answered {data[:300]!r}; expected a JSON object")
    return value


def _unreachable(target: Target, error: Exception) -> str:
    return (
        f"could not reach {target.url}: {describe(error)}. Is that model server running? To answer these calls with weights at hand, "
        "name the agent under agents.frozen with the model 'base', or train it."
    )
