"""One model call with a plain HTTP client. A spawned process imports this module, so it imports little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx2

_client = httpx2.Client(trust_env=False, timeout=120)  # as in most programs, built once


def body_of(prompt: str) -> dict[str, Any]:
    """The body of the request for ``prompt``."""
    return {"model": "gpt", "messages": [{"role": "user", "content": prompt}]}


def ask(url: str, prompt: str) -> str:
    """The answer of the model at ``url``."""
    response = _client.post(f"{url}/v1/chat/completions", json=body_of(prompt))
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"]


def ask_all(url: str, prompts: Sequence[str]) -> list[str]:
    """The answers to ``prompts``, one after the other."""
    return [ask(url, prompt) for prompt in prompts]


async def ask_async(client: httpx2.AsyncClient, url: str, prompt: str) -> str:
    """As `ask`, with a client of the event loop."""
    response = await client.post(f"{url}/v1/chat/completions", json=body_of(prompt))
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"]


def new_client() -> httpx2.AsyncClient:
    """A client for one event loop."""
    return httpx2.AsyncClient(trust_env=False, timeout=120)
