"""Models that somebody else serves: calls of agents that are not trained are passed on to them, and recorded."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from lightning_core.errors import ConfigError, UpstreamError
from lightning_core.trace import describe


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


def upstream_target(base_url: str, api_key_env: str | None) -> Target:
    """The configured upstream. Raises `ConfigError` if the environment variable with its key is not set."""
    key = None
    if api_key_env:
        key = os.environ.get(api_key_env)
        if not key:
            raise ConfigError(
                f"policy.upstream.api_key_env names {api_key_env!r}, but that environment variable is not set"
            )
    return Target(
        url=f"{base_url.rstrip('/')}/chat/completions", headers={"authorization": f"Bearer {key}"} if key else {}
    )


class Upstream:
    """An HTTP client for other people's model servers."""

    def __init__(self, timeout_seconds: float = 120.0) -> None:
        self._client = httpx.AsyncClient(timeout=timeout_seconds)

    async def complete(self, target: Target, body: Mapping[str, Any]) -> dict[str, Any]:
        """Pass on a request without streaming. Raises `UpstreamError` if the server is not there or answers with an error."""
        try:
            response = await self._client.post(target.url, json=body, headers=target.headers)
        except httpx.HTTPError as error:
            raise UpstreamError(_unreachable(target, error)) from error
        if response.status_code != 200:
            raise UpstreamError(f"{target.url} answered {response.status_code}: {response.text[:300]}")
        return response.json()

    async def stream(
        self, target: Target, body: Mapping[str, Any]
    ) -> AsyncGenerator[tuple[bytes, Mapping[str, Any] | None]]:
        """Pass on a streamed request: each event's bytes as they came, with their JSON (None for the closing mark)."""
        try:
            async with self._client.stream("POST", target.url, json=body, headers=target.headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise UpstreamError(f"{target.url} answered {response.status_code}: {response.text[:300]}")
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        data = line[5:].strip()
                        yield f"data: {data}\n\n".encode(), None if data == "[DONE]" else json.loads(data)
        except httpx.HTTPError as error:
            raise UpstreamError(_unreachable(target, error)) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _unreachable(target: Target, error: Exception) -> str:
    return (
        f"could not reach {target.url}: {describe(error)}. Is that model server running? To answer these calls with weights at hand, "
        "name the agent under agents.frozen with the model 'base', or train it."
    )
