"""LangChain models whose connections are their own."""

from __future__ import annotations

import httpx
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


def chat_model(url: str) -> ChatOpenAI:
    """A model at ``url`` for one event loop; by default models share a client, which keeps the loop of its first call."""
    return ChatOpenAI(
        model="gpt",
        base_url=f"{url}/v1",
        api_key=SecretStr("sk-own"),
        max_retries=0,
        http_client=httpx.Client(trust_env=False, timeout=120),
        http_async_client=httpx.AsyncClient(trust_env=False, timeout=120),
    )
