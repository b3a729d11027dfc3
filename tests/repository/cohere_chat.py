"""The wire format of Cohere's chat, version 2: text only. The example of CONTRIBUTING.md, as a module of `lightning_core.dialects`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_core.chat.messages import Message
from lightning_core.dialects.dialect import sse
from lightning_core.dialects.exchange import ChatRequest, Choice, ResponseContext, UpstreamResponse, model_name
from lightning_core.dialects.fields import (
    OFF_POLICY,
    TEXT_ONLY,
    Fields,
    UnsupportedField,
    flag,
    integer,
    number,
    objects,
    seed,
    stops,
    temperature,
)
from lightning_core.errors import PolicyRequestError

PATH = "/v2/chat"
KEY_HEADER = "authorization"
FORWARDED_HEADERS: Sequence[str] = ("x-client-name",)

FIELDS = Fields(
    supported=frozenset({"model", "messages", "stream", "max_tokens", "stop_sequences", "temperature", "p", "seed"}),
    ignored=frozenset({"safety_mode", "priority", "citation_options"}),
    dropped={
        "k": UnsupportedField(OFF_POLICY, unless=(0,)),
        "frequency_penalty": UnsupportedField(OFF_POLICY, unless=(0,)),
        "presence_penalty": UnsupportedField(OFF_POLICY, unless=(0,)),
    },
    refused={name: UnsupportedField(TEXT_ONLY, unless=([],)) for name in ("tools", "documents", "response_format")},
)
NESTED: Mapping[str, Fields] = {}

_REASONS = {"stop": "COMPLETE", "length": "MAX_TOKENS"}


def parse_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse_request`."""
    FIELDS.check(body)
    return replace(
        read_request(body, conversations=conversations),
        temperature=temperature(body),
        top_p=number(body, "p", 0.01, 0.99),
        max_tokens=integer(body, "max_tokens", 1),
        stop=stops(body, "stop_sequences"),
        seed=seed(body),
    )


def read_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.read_request`."""
    del conversations  # a request has its whole conversation
    messages = [
        {"role": message.get("role"), "content": _text(message.get("content"), f"messages.{index}.content")}
        for index, message in enumerate(objects(body, "messages"))
    ]
    return ChatRequest(model=model_name(body), messages=messages, stream=flag(body, "stream") or False, body=body)


def _text(content: Any, path: str) -> str:
    """The text of a message: a string, or parts of type ``text``."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise PolicyRequestError(f"{path} is {content!r}; expected a string or parts of text", param=path)


def write_response(context: ResponseContext, choices: Sequence[Choice]) -> dict[str, Any]:
    """See `Dialect.write_response`."""
    (choice,) = choices
    content = [{"type": "text", "text": choice.message.get("content") or ""}]
    return {"id": context.call, "message": {"role": "assistant", "content": content}, **_end(context, choice)}


def _end(context: ResponseContext, choice: Choice) -> dict[str, Any]:
    reason = "STOP_SEQUENCE" if choice.stop is not None else _REASONS[choice.finish_reason]
    tokens = {"input_tokens": context.prompt_tokens, "output_tokens": len(choice.token_ids)}
    return {"finish_reason": reason, "usage": {"tokens": tokens}}


class _Writer:
    def __init__(self, context: ResponseContext) -> None:
        self._context = context

    def begin(self, index: int) -> bytes:
        start = _event("message-start", id=self._context.call, delta={"message": {"role": "assistant", "content": []}})
        return start + _event("content-start", index=0, delta=_part(type="text", text=""))

    def think(self, index: int, reasoning: str) -> bytes:
        return b""

    def more(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
        return _event("content-delta", index=0, delta=_part(text=text)) if text else b""

    def finish(self, index: int, choice: Choice, rest: str) -> bytes:
        end = _event("message-end", id=self._context.call, delta=_end(self._context, choice))
        return self.more(index, rest, (), ()) + _event("content-end", index=0) + end

    def end(self, choices: Sequence[Choice]) -> bytes:
        return b""


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _part(**content: str) -> dict[str, Any]:
    return {"message": {"content": content}}


def stream_writer(context: ResponseContext) -> _Writer:
    """See `Dialect.stream_writer`."""
    return _Writer(context)


def read_response(body: Mapping[str, Any]) -> list[UpstreamResponse]:
    """See `Dialect.read_response`."""
    parts = (body.get("message") or {}).get("content") or ()
    tokens = (body.get("usage") or {}).get("tokens") or {}
    if body.get("finish_reason") is None:
        return []
    return [
        UpstreamResponse(
            message={"role": "assistant", "content": "".join(part.get("text") or "" for part in parts)},
            finish_reason=body["finish_reason"],
            input_tokens=tokens.get("input_tokens"),
            output_tokens=tokens.get("output_tokens"),
        )
    ]


class _Reader:
    def __init__(self) -> None:
        self.over = False
        self._text = ""
        self._end: Mapping[str, Any] = {}

    def read(self, event: Mapping[str, Any]) -> None:
        delta = event.get("delta") or {}
        if event.get("type") in ("content-start", "content-delta"):
            self._text += delta["message"]["content"].get("text") or ""
        elif event.get("type") == "message-end":
            self.over, self._end = True, delta

    def responses(self) -> list[UpstreamResponse]:
        return read_response({**self._end, "message": {"content": [{"text": self._text}]}})


def stream_reader() -> _Reader:
    """See `Dialect.stream_reader`."""
    return _Reader()


def error_body(message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
    """See `Dialect.error_body`."""
    return {"message": message}


def error_event(message: str) -> bytes:
    """See `Dialect.error_event`."""
    return _event("message-end", delta={"finish_reason": "ERROR", "error": message})
