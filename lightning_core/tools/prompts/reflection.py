"""The model that proposes system prompts, behind an OpenAI-compatible API."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from lightning_core.capture.context import outside_rollout
from lightning_core.config import Config
from lightning_core.endpoint.transport.api_key import read_api_key
from lightning_core.errors import ConfigError, InfrastructureError, fold
from lightning_core.tools.interchange.retries import NoAnswer, request_object


@dataclass(slots=True, kw_only=True)
class ReflectionModel:
    """Answers a prompt. Called by GEPA with a text or with messages."""

    model: str
    base_url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 300.0
    calls: int = 0
    """Number of responses so far."""
    tokens: int = 0
    """Tokens of prompts and responses so far, as far as the server reports them."""

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """The text of the response. Raises `InfrastructureError` without one."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body = self._post({"model": self.model, "messages": messages})
        usage = body.get("usage") or {}
        self.calls += 1
        self.tokens += int(usage.get("total_tokens") or 0)
        match body:
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                return text
            case _:
                raise InfrastructureError(f"{self.base_url} returned no text: {fold(str(body), 240)}")

    def _post(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            with outside_rollout():
                return request_object(lambda: httpx.post(url, json=body, headers=headers, timeout=self.timeout_seconds))
        except NoAnswer as error:
            raise InfrastructureError(
                f"the reflection model {self.model!r} at {self.base_url} did not answer: {error}. Check --reflection, its URL and its key"
            ) from None


def open_reflection(config: Config, model: str, url: str | None, key_env: str | None) -> ReflectionModel:
    """The model at ``url``, with the key in the environment variable ``key_env``; without a URL, at ``policy.upstream``.

    Raises `ConfigError` without either, if the variable is not set, or for a variable without a URL.
    """
    if key_env is not None and url is None:
        raise ConfigError(
            "--reflection-key-env names the key of --reflection-url, which is missing. Pass both, or remove --reflection-key-env"
        )
    upstream = config.policy.upstream
    if url is not None:
        key = read_api_key(key_env, "--reflection-key-env")
    elif upstream is not None:
        url, key = upstream.base_url, read_api_key(upstream.api_key_env, "policy.upstream.api_key_env")
    elif os.environ.get("OPENAI_API_KEY"):
        url, key = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1"), os.environ["OPENAI_API_KEY"]
    else:
        raise ConfigError(
            f"no server for the reflection model {model!r}: set policy.upstream, pass --reflection-url, or set OPENAI_API_KEY"
        )
    return ReflectionModel(model=model, base_url=url, api_key=key)
