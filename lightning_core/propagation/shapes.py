"""Recognizes model calls by the shape of a request, on any host.

A POST is a model call if its JSON body has ``model`` and a conversation: a list ``messages`` or ``contents`` of objects with roles.
With ``input`` or ``prompt`` instead it is one unless the path names another service, such as images, audio, embeddings, files or batches.
Instead of ``model`` the path may name the model, as for Gemini, Azure and Bedrock.

Paths of the endpoint's own wire formats are recognized by their suffix, so bodies that cannot be read without consuming them (streams,
bodies compressed with other than gzip or deflate) are recognized there and nowhere else. Others need ``model`` or a conversation.
``/messages`` and ``/responses`` are paths of other services too: the body must have the fields of the format, and one that is not read or
names no model needs a version or provider before the suffix, as in ``/v1/messages``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from pydantic_core import from_json

from lightning_core.propagation.compression import decompress, encodings


class Unseen:
    """The type of `UNSEEN`."""


UNSEEN: Final = Unseen()
"""A body that cannot be read without consuming it."""

_MOST_BYTES = 32 << 20
"""Most bytes of a decompressed body that is looked at, which is the endpoint's limit."""


@dataclass(frozen=True, slots=True)
class Compressed:
    """A body with a content encoding, which is read only if it matters."""

    data: bytes
    encodings: Sequence[str]

    def read(self) -> bytes | Unseen:
        """The body; `UNSEEN` if it cannot be decompressed."""
        try:
            plain = decompress(self.data, self.encodings, most_bytes=_MOST_BYTES)
        except (LookupError, ValueError):
            return UNSEEN
        return plain if len(plain) <= _MOST_BYTES else UNSEEN


Body = Mapping[str, Any] | bytes | bytearray | memoryview | str | Unseen | None

ORIGIN_PATH = "/origin"
"""Prefix of the endpoint's paths for wire formats that it does not have."""

# The endpoint's paths, the longest first.
_ROUTES = (
    "/responses/input_tokens",
    "/messages/count_tokens",
    "/responses/compact",
    "/chat/completions",
    "/completions",
    "/responses",
    "/messages",
)
_COMMON_WORDS = ("/completions", "/responses", "/messages")
"""Routes that other services use too; the body decides."""
_OTHER_FORMATS = ("/agents/completions", "/fim/completions")
_VERSIONED = re.compile(r"/(?:v\d\w*|openai|anthropic)/(?:responses|messages)$")
_GEMINI = re.compile(
    r"/(?:models|tunedModels|endpoints)/([^/]+:(?:generateContent|streamGenerateContent|countTokens))$"
)
_MODEL_IN_PATH = re.compile(r"/(?:models?|deployments|engines|publishers)/[^/]+")
_BEDROCK = re.compile(r"/model/[^/]+/(?:invoke|invoke-with-response-stream)$")
_BEDROCK_CONVERSE = re.compile(r"/model/[^/]+/converse(?:-stream)?$")

# Services whose bodies have `input` or `prompt`, by the last two segments of the path.
_OTHER_SERVICES = re.compile(
    r"embed|image|audio|speech|voice|video|music|moderation|rerank|fine.?tun|batch|upload|transcri|translat|cachedcontent|realtime"
    r"|vector|token(?:ize|s$)|classif|predictions|stability|\bocr\b|\bfiles?\b|\bscore\b|\bpooling\b|\bsearch\b|\bgenerations\b|\bevals?\b"
    r"|\bassistants\b|\bthreads\b|/api/(?:pull|push|create|show|copy|delete)$"
)
# Services whose bodies have a conversation, by the last segment.
_CONVERSATIONS_ELSEWHERE = re.compile(r"/(?:embed|embeddings|tokenize|pooling|cachedContents)$")
_MODEL = "model"
_CONVERSATION = ("messages", "contents")
_READ = (*_CONVERSATION, "input", "prompt", "inputText", "previous_response_id", "conversation")
"""A body without any of these fields is not parsed."""


def find_route(method: str, path: str, body: Body) -> str | None:
    """The path of the endpoint, after its base URL, that answers a model call; None for other requests.

    A model call in another wire format gets a path under `ORIGIN_PATH`.
    """
    if method.upper() != "POST":
        return None
    path = path.rstrip("/")
    if gemini := _GEMINI.search(path):
        return f"/models/{gemini[1]}"
    route = None if path.endswith(_OTHER_FORMATS) else next(filter(path.endswith, _ROUTES), None)
    if route is not None and route not in _COMMON_WORDS:
        fields = (_MODEL, "messages") if route == "/chat/completions" else (_MODEL, *_READ)
        return route if isinstance(body, Unseen) or _mentions(body, fields) else None
    if isinstance(body, Unseen):
        return route if route == "/completions" or _VERSIONED.search(path) else None
    if _BEDROCK_CONVERSE.search(path):
        return f"{ORIGIN_PATH}{path}"
    bedrock = _BEDROCK.search(path) is not None
    in_path = bedrock or _MODEL_IN_PATH.search(path) is not None
    # Parsing is expensive: a body may have megabytes.
    if not _mentions(body, _READ) or (route is None and not in_path and not _mentions(body, (_MODEL,))):
        return None
    other = _OTHER_SERVICES.search("/".join(path.lower().rsplit("/", 2)[-2:])) is not None
    if other and not _mentions(body, _CONVERSATION):
        return None
    value = _parse(body)
    if value is None:
        return None
    model = value.get(_MODEL)
    if not isinstance(model, str | None):
        return None
    named = model is not None
    if route is not None and _fits(route, value, has_model=named or in_path or _VERSIONED.search(path) is not None):
        return route
    if not (named or in_path) or _CONVERSATIONS_ELSEWHERE.search(path):
        return None
    if any(_is_conversation(value.get(name)) for name in _CONVERSATION):
        return f"{ORIGIN_PATH}{path}"
    return None if other or not _has_text(value, named=named, bedrock=bedrock) else f"{ORIGIN_PATH}{path}"


def lacks_model(method: str, path: str, body: Body) -> bool:
    """Whether a request would be a model call if its body named a model, as with servers that have a default model.

    ``input`` alone is not enough: the requests of many other services have it.
    """
    if method.upper() != "POST" or not _mentions(body, (*_CONVERSATION, "prompt")):
        return False
    value = _parse(body)
    if value is None or value.get(_MODEL) is not None:
        return False
    named = {_MODEL: ""} | {name: item for name, item in value.items() if name != "input"}
    return find_route(method, path, named) is not None


def _fits(route: str, value: Mapping[str, Any], *, has_model: bool) -> bool:
    """Whether a body has the fields of one of `_COMMON_WORDS`, with their types."""
    prompt = value.get("prompt")
    if route == "/completions":
        return isinstance(prompt, (str, list))
    if route == "/messages":
        messages = value.get("messages")
        return has_model and (_is_conversation(messages) if _MODEL not in value else isinstance(messages, list))
    if isinstance(prompt, dict) and isinstance(cast("dict[str, Any]", prompt).get("id"), str):
        return True  # a stored prompt, which names the model
    return has_model and (
        isinstance(value.get("input"), (str, list))
        or isinstance(value.get("previous_response_id"), str)
        or isinstance(value.get("conversation"), (str, dict))
    )


def _is_conversation(value: Any) -> bool:
    """Whether ``value`` is a list of objects with a ``role``, or with the ``parts`` of Gemini."""
    if not isinstance(value, list):
        return False
    items = cast("list[Any]", value)
    return bool(items) and all(isinstance(item, dict) and ("role" in item or "parts" in item) for item in items)


def _has_text(value: Mapping[str, Any], *, named: bool, bedrock: bool) -> bool:
    """Whether a body without a conversation has the fields of a model call."""
    if bedrock:
        return any(name in value for name in (*_CONVERSATION, "prompt", "inputText"))
    if named and any(isinstance(value.get(name), (str, list, dict)) for name in ("input", "prompt")):
        return True
    return any(isinstance(value.get(name), list) for name in _CONVERSATION)


def _mentions(body: Body, fields: Iterable[str]) -> bool:
    """Whether ``body`` may have one of ``fields``; cheap, and exact for a mapping."""
    if isinstance(body, Mapping):
        return any(name in body for name in fields)
    if isinstance(body, str):
        return any(f'"{name}"' in body for name in fields)
    if isinstance(body, memoryview):
        body = bytes(body)
    return isinstance(body, (bytes, bytearray)) and any(f'"{name}"'.encode() in body for name in fields)


def _parse(body: Body) -> Mapping[str, Any] | None:
    if isinstance(body, Mapping):
        return body
    if isinstance(body, memoryview):
        body = bytes(body)
    if not isinstance(body, (bytes, bytearray, str)):
        return None
    try:
        value = from_json(body)
    except ValueError:
        return None
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else None


def seen_body(body: Any, headers: Mapping[str, str]) -> Body | Compressed:
    """``body`` if it can be read without consuming it, else `UNSEEN`. It is not decompressed yet.

    None if it cannot be JSON: an empty body, a form, or parts of several types.
    """
    if body is None or header(headers, "content-type").startswith(("multipart/", "application/x-www-form-urlencoded")):
        return None
    if not isinstance(body, (bytes, bytearray, memoryview, str)):
        return UNSEEN
    if (applied := encodings(header(headers, "content-encoding"))) and not isinstance(body, str):
        return Compressed(bytes(body), applied)
    return body


def header(headers: Mapping[str, Any], name: str) -> str:
    """A header's value, which some clients accept as bytes; empty if it is not set."""
    value = headers.get(name, "")
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
