"""The models of a switch as HTTP servers, and requests as they are sent to one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from pydantic_core import to_json

from lightning_core.dialects import ALL_DIALECTS, gemini
from lightning_core.dialects.dialect import Dialect
from lightning_core.propagation.providers import KEY_HEADERS

_VERSION = re.compile(r"^/v\d+(?:alpha|beta)?(?:\d+)?(?=/)")
_GEMINI = re.compile(r"(?P<before>.*/models/)(?P<model>[^/:]+):(?P<method>\w+)$")
_GENERATING = ("generateContent", "streamGenerateContent")
_COUNTING = ("countTokens",)
_OTHER_PATHS = ("/embeddings", "/messages/count_tokens", "/responses/input_tokens", "/responses/compact")
"""Paths beside those of model calls that are forwarded."""
_SENT = frozenset({"content-type", "accept", "user-agent", "traceparent", "tracestate", "idempotency-key"})
_SENT_PREFIXES = ("anthropic-", "openai-beta", "x-stainless-", "x-goog-api-client")
_OF_THE_KEY = ("openai-organization", "openai-project")
"""Headers that belong to a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A server and the model that answers there."""

    name: str
    base_url: str
    """Without a slash at the end."""
    model: str | None = None
    """The model's name there; None: the one that the request names."""
    api_key: str | None = field(default=None, repr=False)
    """The server's key."""
    gets_request_key: bool = False
    """Whether it gets the key of the request, without one of its own."""
    is_local: bool = False
    """Whether it is on this machine, and reached without a proxy."""
    is_own: bool = False
    """Whether this process serves it."""

    def url(self, path: str, query: str) -> str:
        """The URL for a request to ``path`` of the switch."""
        path = _VERSION.sub("", path, count=1)
        if self.model is not None and (match := _GEMINI.fullmatch(path)) is not None:
            path = f"{match['before']}{quote(self.model, safe='')}:{match['method']}"
        if not self.gets_request_key:  # Google's clients may send the key here
            query = urlencode(
                [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if name != "key"]
            )
        return f"{self.base_url}{path}{f'?{query}' if query else ''}"

    def content(self, body: Mapping[str, Any], data: bytes) -> bytes:
        """The body to send: ``data``, or the JSON ``body`` with this arm's model."""
        if self.model is None or "model" not in body or body["model"] == self.model:
            return data
        return to_json({**body, "model": self.model})

    def headers(self, received: Sequence[tuple[str, str]], key_header: str) -> list[tuple[bytes, bytes]]:
        """The headers to send; ``received`` have lower-case names, and values in Latin-1."""
        keys = ("authorization", *KEY_HEADERS, *_OF_THE_KEY) if self.gets_request_key else ()
        kept = [
            (name, value)
            for name, value in received
            if name in _SENT or name in keys or name.startswith(_SENT_PREFIXES)
        ]
        if self.api_key is not None:
            kept.append((key_header, f"Bearer {self.api_key}" if key_header == "authorization" else self.api_key))
        # Without an encoding, so that usage can be read from the response.
        kept.append(("accept-encoding", "identity"))
        return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in kept]


def is_forwarded(method: str, path: str) -> bool:
    """Whether a switch forwards such requests: model calls, and those that count tokens or compute embeddings."""
    if method != "POST" or any(part in (".", "..") for part in unquote(path).split("/")):
        return False
    if dialect_of_path(path) is not None or _VERSION.sub("", path, count=1) in _OTHER_PATHS:
        return True
    match = _GEMINI.fullmatch(path)
    return match is not None and match["method"] in _COUNTING


def dialect_of_path(path: str) -> Dialect | None:
    """The wire format of model calls to ``path``; None for all other requests."""
    if (match := _GEMINI.fullmatch(path)) is not None:
        return gemini if match["method"] in _GENERATING else None
    rest = _VERSION.sub("", path, count=1)
    return next((dialect for dialect in ALL_DIALECTS if dialect is not gemini and rest == dialect.PATH), None)


def requested_model(path: str, body: Mapping[str, Any]) -> str:
    """The model that a request names; empty if it names none."""
    match = _GEMINI.fullmatch(path)
    return match["model"] if match is not None else str(body.get("model") or "")
