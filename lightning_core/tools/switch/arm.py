"""The models of a switch as HTTP servers, and requests as they are sent to one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from pydantic_core import to_json

from lightning_core.dialects import ALL_DIALECTS, gemini
from lightning_core.dialects.dialect import Dialect
from lightning_core.propagation.providers import KEY_HEADERS

_VERSION = re.compile(r"^/v\d+(?:alpha|beta)?(?:\d+)?(?=/)")
_GEMINI = re.compile(r"(?P<before>.*/models/)(?P<model>[^/:]+):(?P<method>\w+)$")
_GENERATING = ("generateContent", "streamGenerateContent")
# Of one connection, or of the switch. Encodings are not accepted, so that usage can be read from the response.
_NOT_SENT = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"}
    | {"host", "content-length", "content-encoding", "accept-encoding"}
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A server and the model that answers there."""

    name: str
    base_url: str
    """Without a slash at the end."""
    model: str | None = None
    """The model's name there; None: the one that the request names."""
    api_key: str | None = field(default=None, repr=False)
    """The server's key; None: the key of the request."""
    is_local: bool = False
    """Whether this process serves it, and needs no key."""

    def url(self, path: str, query: str) -> str:
        """The URL for a request to ``path`` of the switch."""
        path = _VERSION.sub("", path, count=1)
        if self.model is not None and (match := _GEMINI.fullmatch(path)) is not None:
            path = f"{match['before']}{quote(self.model, safe='')}:{match['method']}"
        return f"{self.base_url}{path}{f'?{query}' if query else ''}"

    def content(self, body: Mapping[str, Any], data: bytes) -> bytes:
        """The body to send: ``data``, or the JSON ``body`` with this arm's model."""
        if self.model is None or "model" not in body or body["model"] == self.model:
            return data
        return to_json({**body, "model": self.model})

    def headers(self, received: Mapping[str, str], key_header: str) -> dict[str, str]:
        """The headers to send; ``received`` have lower-case names."""
        kept = {
            name: value
            for name, value in received.items()
            if name not in _NOT_SENT and not name.startswith("lightning-")
        }
        if self.api_key is not None or self.is_local:
            kept = {name: value for name, value in kept.items() if name not in ("authorization", *KEY_HEADERS)}
        if self.api_key is not None:
            kept[key_header] = f"Bearer {self.api_key}" if key_header == "authorization" else self.api_key
        return {**kept, "accept-encoding": "identity"}


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
