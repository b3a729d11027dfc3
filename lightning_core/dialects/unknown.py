"""A wire format that the endpoint does not have, such as Ollama's, Cohere's or Bedrock's.

Its requests are recorded and forwarded. They cannot be answered here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lightning_core.chat.messages import Message
from lightning_core.dialects.exchange import ChatRequest, ResponseContext, UpstreamResponse, model_name
from lightning_core.dialects.fields import Fields
from lightning_core.errors import PolicyRequestError

SUPPORTED = (
    "OpenAI's chat completions, Responses or completions, Anthropic's Messages or Gemini's generateContent. Most providers and local "
    "servers also have an OpenAI-compatible API, often under the base URL /v1"
)
"""The APIs to use instead."""


class OtherFormat:
    """The wire format of the API at ``path`` of some provider; see `Dialect`."""

    KEY_HEADER = "authorization"
    FORWARDED_HEADERS: Sequence[str] = ()

    def __init__(self, path: str) -> None:
        self.PATH = path
        self.FIELDS = Fields(supported=frozenset())
        self.NESTED: Mapping[str, Fields] = {}

    def parse_request(self, body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """Refuse the request: it would have to be answered here."""
        self._refuse()

    def read_request(self, body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """The messages, as far as they are where other formats have them."""
        prompt = next((body[name] for name in ("messages", "contents", "input", "prompt") if name in body), [])
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return ChatRequest(model=model_name(body), messages=messages, body=body)

    def write_response(self, context: ResponseContext, choices: Sequence[Any]) -> dict[str, Any]:
        """Not possible."""
        self._refuse()

    def stream_writer(self, context: ResponseContext) -> NoReturn:
        """Not possible."""
        self._refuse()

    def read_response(self, body: Mapping[str, Any]) -> list[UpstreamResponse]:
        """Responses are not read."""
        return []

    def stream_reader(self) -> NoReturn:
        """Not possible."""
        self._refuse()

    def error_body(self, message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
        """An error with its message where clients look for it."""
        if "/api/" in self.PATH and not self.PATH.startswith("/api/v"):
            return {"error": message}  # Ollama
        if "/model/" in self.PATH:
            return {"message": message, "code": "ValidationException"}  # Bedrock
        return {"message": message, "error": {"message": message, "type": "invalid_request_error", "code": None}}

    def error_event(self, message: str) -> bytes:
        """Nothing: how the format reports an error in a stream is not known."""
        return b""

    def _refuse(self) -> NoReturn:
        raise PolicyRequestError(
            f"this call must be answered by a model of the run, which does not support the API {self.PATH}. Use a client of {SUPPORTED}. "
            "If the call is not the trained agent's, name its agent, or add the host to rollouts.ignore_hosts"
        )
