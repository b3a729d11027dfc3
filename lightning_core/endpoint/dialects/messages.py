"""Anthropic's Messages API on the wire: what a request may say, how an answer looks, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.endpoint.dialects.chat_shape import check_tools
from lightning_core.endpoint.dialects.dialect import sse
from lightning_core.endpoint.dialects.exchange import Answer, ChatRequest, Choice, Message, Reply, model_name
from lightning_core.endpoint.dialects.fields import (
    NO_HOSTED_TOOLS,
    NOT_KEPT,
    OFF_POLICY,
    Fields,
    Refusal,
    flag,
    integer,
    objects,
    stops,
    temperature,
    top_p,
)
from lightning_core.endpoint.dialects.message_blocks import function_tool, text_of, to_blocks, to_chat
from lightning_core.endpoint.dialects.response_format import ANY_TOOL, Demands, check_tool
from lightning_core.errors import PolicyRequestError

PATH = "/messages"
KEY_HEADER = "x-api-key"
PASSED_HEADERS = ("anthropic-version", "anthropic-beta")

FIELDS = Fields(
    honoured=frozenset({
        "model", "messages", "system", "max_tokens", "tools", "tool_choice", "temperature", "top_p", "stop_sequences", "stream",
        "output_config.format",
    }),
    inert=frozenset({
        "billing_policy", "cache_control", "inference_geo", "metadata", "output_config.effort", "service_tier", "speed", "thinking",
        "user_profile_id", "workspace_id",
    }),
    refused={
        "compaction": Refusal("a conversation is never compacted here"),
        "container": Refusal(NO_HOSTED_TOOLS),
        "context_management": Refusal("what a conversation holds is never changed here"),
        "diagnostics": Refusal("nothing is cached that could be diagnosed"),
        "fallback_credit_token": Refusal("no other model answers in place of the one that is asked"),
        "fallbacks": Refusal("no other model answers in place of the one that is asked", unless=([],)),
        "mcp_servers": Refusal(NO_HOSTED_TOOLS, unless=([],)),
        "output_config.task_budget": Refusal("a model here knows of no budget; set max_tokens"),
        "output_format": Refusal("use output_config.format"),
        "thread": Refusal(NOT_KEPT),
        "top_k": Refusal(OFF_POLICY),
    },
)  # fmt: skip

_FINISH_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def parse_request(body: Mapping[str, Any], *, said: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse_request`."""
    del said
    FIELDS.check(body)
    if body.get("max_tokens") is None:
        raise PolicyRequestError("max_tokens is missing", param="max_tokens")
    turns = objects(body, "messages")
    if turns and turns[-1].get("role") == "assistant":
        raise PolicyRequestError(
            "messages ends with an assistant's turn; a prefilled answer cannot be continued here", param="messages"
        )
    tools = [function_tool(tool, i, check=True) for i, tool in enumerate(objects(body, "tools"))]
    check_tools(tools)
    messages, system = to_chat(turns, check=True), text_of(body.get("system") or "", "system", check=True)
    return ChatRequest(
        model=model_name(body),
        messages=[{"role": "system", "content": system}, *messages] if system else messages,
        tools=None if body.get("tool_choice") == {"type": "none"} else tools or None,
        temperature=temperature(body),
        top_p=top_p(body),
        max_tokens=integer(body, "max_tokens", 1),
        stop=stops(body, "stop_sequences"),
        stream=flag(body, "stream") or False,
        demands=_demands(body, tools),
        body=body,
    )


def read_request(body: Mapping[str, Any], *, said: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.read_request`."""
    del said
    messages = to_chat(objects(body, "messages"), check=False)
    system = text_of(body.get("system") or "", "system", check=False)
    return ChatRequest(
        model=model_name(body),
        messages=[{"role": "system", "content": system}, *messages] if system else messages,
        tools=[function_tool(tool, i, check=False) for i, tool in enumerate(objects(body, "tools"))] or None,
        stream=flag(body, "stream") or False,
        body=body,
    )


def _demands(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Demands:
    choice = body.get("tool_choice") or {"type": "auto"}
    match choice:
        case {"type": "auto" | "none"}:
            tool = None
        case {"type": "any"}:
            tool = ANY_TOOL
        case {"type": "tool", "name": str(tool)}:
            pass
        case _:
            raise PolicyRequestError(
                f"tool_choice is {choice!r}; expected the type auto, any, tool or none", param="tool_choice"
            )
    output = body.get("output_config") or {}
    match output.get("format"):
        case None:
            schema = None
        case {"type": "json_schema", "schema": dict(schema)}:
            pass
        case form:
            raise PolicyRequestError(
                f"output_config.format is {form!r}; expected the type json_schema with a schema", param="output_config"
            )
    one_call = flag(choice, "disable_parallel_tool_use") is True and bool(tools)
    return Demands(schema=schema, tool=check_tool(tool, tools), one_call=one_call)


def write_answer(reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    """See `Dialect.write_answer`."""
    (choice,) = choices
    return {
        **_head(reply),
        "content": to_blocks(choice.message),
        **_end(choice),
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(choice.token_ids)},
    }


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.call}", "type": "message", "role": "assistant", "model": reply.model}


def _end(choice: Choice) -> dict[str, Any]:
    by_text = choice.stop is not None and choice.finish_reason == "stop"
    return {
        "stop_reason": "stop_sequence" if by_text else _STOP_REASONS[choice.finish_reason],
        "stop_sequence": choice.stop if by_text else None,
    }


class _Writer:
    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._blocks = 0
        self._text_block: int | None = None

    def begin(self, index: int) -> bytes:
        usage = {"input_tokens": self._reply.prompt_tokens, "output_tokens": 0}
        empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message={**_head(self._reply), **empty})

    def think(self, index: int, reasoning: str) -> bytes:
        self._blocks = 1
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        return (
            _event("content_block_start", index=0, content_block=empty)
            + _event("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": reasoning})
            + _event("content_block_stop", index=0)
        )

    def more(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
        return self._text(text) if text else b""

    def finish(self, index: int, choice: Choice, rest: str) -> bytes:
        events = self._text(rest) if rest else b""
        if self._text_block is not None:
            events += _event("content_block_stop", index=self._text_block)
        for block in to_blocks(choice.message):
            if block["type"] == "tool_use":
                events += self._tool_use(block)
        return (
            events
            + _event("message_delta", delta=_end(choice), usage={"output_tokens": len(choice.token_ids)})
            + _event("message_stop")
        )

    def end(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def _text(self, text: str) -> bytes:
        events = b""
        if self._text_block is None:
            self._text_block, self._blocks = self._blocks, self._blocks + 1
            started = {"type": "text", "text": ""}
            events = _event("content_block_start", index=self._text_block, content_block=started)
        return events + _event(
            "content_block_delta", index=self._text_block, delta={"type": "text_delta", "text": text}
        )

    def _tool_use(self, block: Mapping[str, Any]) -> bytes:
        index, self._blocks = self._blocks, self._blocks + 1
        written = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        return (
            _event("content_block_start", index=index, content_block={**block, "input": {}})
            + _event("content_block_delta", index=index, delta=written)
            + _event("content_block_stop", index=index)
        )


def _event(kind: str, **more: Any) -> bytes:
    return sse({"type": kind, **more}, kind)


def stream_writer(reply: Reply) -> _Writer:
    """See `Dialect.stream_writer`."""
    return _Writer(reply)


def read_answer(body: Mapping[str, Any]) -> list[Answer]:
    """See `Dialect.read_answer`."""
    if body.get("type") != "message" or not body.get("stop_reason"):
        return []
    (message,) = to_chat([{"role": "assistant", "content": body.get("content")}], check=False)
    counts = body.get("usage") or {}
    return [
        Answer(
            message=message,
            finish_reason=_FINISH_REASONS.get(body["stop_reason"], body["stop_reason"]),
            model=body.get("model"),
            input_tokens=counts.get("input_tokens"),
            output_tokens=counts.get("output_tokens"),
        )
    ]


class _Reader:
    """Puts the events together to the body that would have come without streaming."""

    def __init__(self) -> None:
        self._body: dict[str, Any] = {}
        self._blocks: list[dict[str, Any]] = []
        self.over = False

    def read(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"type": "message_start", "message": dict(message)}:
                self._body = {**message}
            case {"type": "content_block_start", "content_block": dict(block)}:
                self._blocks.append({**block})
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": str(text)}}:
                self._blocks[-1]["text"] += text
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": str(part)}}:
                self._blocks[-1]["json"] = self._blocks[-1].get("json", "") + part
            case {"type": "message_delta"}:
                usage = {**(self._body.get("usage") or {}), **(event.get("usage") or {})}
                self._body |= {**(event.get("delta") or {}), "usage": usage}
            case {"type": "message_stop"}:
                self.over = True
            case _:
                pass

    def answers(self) -> list[Answer]:
        for block in self._blocks:
            if "json" in block:
                block["input"] = json.loads(block.pop("json") or "{}")
        return read_answer({**self._body, "content": self._blocks}) if self.over else []


def stream_reader() -> _Reader:
    """See `Dialect.stream_reader`."""
    return _Reader()


def error_body(message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
    """See `Dialect.error_body`. Anthropic's errors have no place for ``param``; the message names it."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_event(message: str) -> bytes:
    """See `Dialect.error_event`."""
    return sse(error_body(message, status=500), "error")
