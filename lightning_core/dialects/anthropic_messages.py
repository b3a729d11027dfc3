"""The wire format of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.chat.json_text import show_json
from lightning_core.chat.messages import Message
from lightning_core.dialects.anthropic_blocks import (
    BLOCKS,
    MESSAGE,
    TOOL,
    read_tools,
    text_of,
    to_blocks,
    to_chat,
)
from lightning_core.dialects.dialect import sse
from lightning_core.dialects.exchange import (
    ChatRequest,
    Choice,
    ResponseContext,
    UpstreamResponse,
    model_name,
)
from lightning_core.dialects.fields import (
    INTEGER,
    NO_HOSTED_TOOLS,
    NOT_STORED,
    OBJECT,
    OFF_POLICY,
    TEXT_OR_LIST,
    TEXT_OR_OBJECT,
    DroppedField,
    Fields,
    UnsupportedField,
    check_variant,
    flag,
    integer,
    objects,
    stops,
    temperature,
    top_p,
)
from lightning_core.dialects.openai_chat_shape import check_tools
from lightning_core.dialects.requirements import ANY_TOOL, OutputRequirements, check_tool_choice
from lightning_core.dialects.thinking import effort, thinking
from lightning_core.dialects.usage import anthropic_tokens
from lightning_core.errors import PolicyRequestError

PATH = "/messages"
KEY_HEADER = "x-api-key"
FORWARDED_HEADERS = ("anthropic-version", "anthropic-beta")

_NO_OTHER = "no other model answers in place of the requested one"

FIELDS = Fields(
    supported=frozenset({
        "model", "messages", "system", "max_tokens", "tools", "tool_choice", "temperature", "top_p", "stop_sequences", "stream",
        "output_config.effort", "output_config.format", "thinking.type",
    }),
    ignored=frozenset({
        "billing_policy", "cache_control", "inference_geo", "metadata", "service_tier", "speed",
        "thinking.block_binding", "thinking.budget_tokens", "thinking.display", "user_profile_id", "workspace_id",
    }),
    dropped={
        "compaction": DroppedField("a conversation is never compacted", kind=OBJECT),
        "context_management": DroppedField(
            "the content of a conversation is never changed",
            unless=({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
            kind=OBJECT,
        ),
        "diagnostics": DroppedField("there is no prompt cache to diagnose", kind=OBJECT),
        "fallback_credit_token": DroppedField(_NO_OTHER, kind=TEXT_OR_OBJECT),
        "fallbacks": DroppedField(_NO_OTHER, unless=([],), kind=TEXT_OR_LIST),
        "output_config.task_budget": DroppedField("the model is not shown a budget; set max_tokens", kind=OBJECT),
        "top_k": DroppedField(OFF_POLICY, kind=INTEGER),
    },
    refused={
        "container": UnsupportedField(NO_HOSTED_TOOLS),
        "mcp_servers": UnsupportedField(NO_HOSTED_TOOLS, unless=([],)),
        "output_format": UnsupportedField("use output_config.format"),
        "thread": UnsupportedField(NOT_STORED),
    },
)  # fmt: skip

TOOL_CHOICES = {
    "auto": Fields(supported=frozenset({"type", "disable_parallel_tool_use"})),
    "any": Fields(supported=frozenset({"type", "disable_parallel_tool_use"})),
    "tool": Fields(supported=frozenset({"type", "disable_parallel_tool_use", "name"})),
    "none": Fields(supported=frozenset({"type"})),
}
FORMAT = Fields(supported=frozenset({"type", "schema"}))

NESTED = {
    "messages.N": MESSAGE,
    **{f"messages.N.content.N ({kind})": fields for kind, fields in BLOCKS.items()},
    "tools.N": TOOL,
    **{f"tool_choice ({kind})": fields for kind, fields in TOOL_CHOICES.items()},
    "output_config.format": FORMAT,
}

_FINISH_REASONS = {
    "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}  # fmt: skip
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def parse_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse_request`."""
    del conversations
    FIELDS.check(body)
    if body.get("max_tokens") is None:
        raise PolicyRequestError("max_tokens is missing; expected the most tokens to sample", param="max_tokens")
    turns = objects(body, "messages")
    if turns and turns[-1].get("role") == "assistant":
        raise PolicyRequestError(
            "messages ends with an assistant message, which cannot be continued; end with a user message",
            param="messages",
        )
    tools, definitions = read_tools(objects(body, "tools"), check=True)
    check_tools(tools, unique=True)
    messages = to_chat(turns, check=True, definitions=definitions)
    system = text_of(body.get("system"), "system", check=True)
    tools, tool, one_call = _tool_choice(body, tools)
    return ChatRequest(
        model=model_name(body),
        messages=[{"role": "system", "content": system}, *messages] if system else messages,
        tools=tools or None,
        temperature=temperature(body),
        top_p=top_p(body),
        max_tokens=integer(body, "max_tokens", 1),
        stop=stops(body, "stop_sequences"),
        stop_field="stop_sequences",
        template_settings={**effort(body.get("output_config") or {}, "effort", "output_config"), **thinking(body)},
        stream=flag(body, "stream") or False,
        requirements=OutputRequirements(
            schema=_schema(body), schema_field="output_config.format", tool=tool, one_call=one_call
        ),
        body=body,
    )


def read_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.read_request`."""
    del conversations
    messages = to_chat(objects(body, "messages"), check=False)
    system = text_of(body.get("system"), "system", check=False)
    return ChatRequest(
        model=model_name(body),
        messages=[{"role": "system", "content": system}, *messages] if system else messages,
        tools=read_tools(objects(body, "tools"), check=False)[0] or None,
        stream=flag(body, "stream") or False,
        body=body,
    )


def _tool_choice(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Mapping[str, Any]], str | None, bool]:
    """The tools that the model is shown, the required one, and whether a response has at most one call."""
    choice = body.get("tool_choice")
    if choice is None:
        choice = {"type": "auto"}
    if isinstance(choice, Mapping):
        check_variant(TOOL_CHOICES, choice, "tool_choice")
    match choice:
        case {"type": "none"}:
            return (), None, False
        case {"type": "auto"}:
            tool = None
        case {"type": "any"}:
            tool = ANY_TOOL
        case {"type": "tool", "name": str(tool)}:
            pass
        case _:
            raise PolicyRequestError(
                f"tool_choice is {show_json(choice)}; expected the type auto, any, none, or tool with a name",
                param="tool_choice",
            )
    one_call = flag(choice, "disable_parallel_tool_use") is True and bool(tools)
    return tools, check_tool_choice(tool, tools), one_call


def _schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The JSON schema of the response."""
    output = body.get("output_config") or {}
    match output.get("format"):
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)} as form:
            FORMAT.check(form, "output_config.format")
            return schema
        case form:
            raise PolicyRequestError(
                f"output_config.format is {show_json(form)}; expected the type json_schema with a schema",
                param="output_config.format",
            )


def write_response(context: ResponseContext, choices: Sequence[Choice]) -> dict[str, Any]:
    """See `Dialect.write_response`."""
    (choice,) = choices
    return {
        **_head(context),
        "content": to_blocks(choice.message),
        **_end(choice),
        "usage": {**_prompt_usage(context), "output_tokens": context.output_tokens([choice])},
    }


def _prompt_usage(context: ResponseContext) -> dict[str, int]:
    """Anthropic counts tokens from the cache apart from the others."""
    read = min(context.cached_tokens, context.prompt_tokens)
    return {"input_tokens": context.prompt_tokens - read, **({"cache_read_input_tokens": read} if read else {})}


def _head(context: ResponseContext) -> dict[str, Any]:
    return {"id": f"msg_{context.call}", "type": "message", "role": "assistant", "model": context.model}


def _end(choice: Choice) -> dict[str, Any]:
    by_text = choice.stop is not None and choice.reason == "stop"
    return {
        "stop_reason": "stop_sequence" if by_text else _STOP_REASONS.get(choice.reason, choice.reason),
        "stop_sequence": choice.stop if by_text else None,
    }


class _Writer:
    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._blocks = 0
        self._text_block: int | None = None

    def begin(self, index: int) -> bytes:
        usage = {**_prompt_usage(self._context), "output_tokens": 0}
        empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message={**_head(self._context), **empty})

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
            + _event(
                "message_delta", delta=_end(choice), usage={"output_tokens": self._context.output_tokens([choice])}
            )
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


def stream_writer(context: ResponseContext) -> _Writer:
    """See `Dialect.stream_writer`."""
    return _Writer(context)


def read_response(body: Mapping[str, Any]) -> list[UpstreamResponse]:
    """See `Dialect.read_response`."""
    if body.get("type") != "message" or not body.get("stop_reason"):
        return []
    (message,) = to_chat([{"role": "assistant", "content": body.get("content")}], check=False)
    return [
        UpstreamResponse(
            message=message,
            finish_reason=_FINISH_REASONS.get(body["stop_reason"], body["stop_reason"]),
            model=body.get("model"),
            **anthropic_tokens(body.get("usage")),
        )
    ]


class _Reader:
    """Assembles the events into the body of a response without streaming."""

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

    def responses(self) -> list[UpstreamResponse]:
        for block in self._blocks:
            if "json" in block:
                block["input"] = json.loads(block.pop("json") or "{}")
        return read_response({**self._body, "content": self._blocks}) if self.over else []


def stream_reader() -> _Reader:
    """See `Dialect.stream_reader`."""
    return _Reader()


def error_body(message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
    """See `Dialect.error_body`.

    Anthropic's errors have no ``param``; the message names the field.
    """
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    # The SDK's tool runner then sends the whole conversation instead.
    details = {"details": {"error_code": "thread_unsupported_request"}} if param == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def error_event(message: str) -> bytes:
    """See `Dialect.error_event`."""
    return sse(error_body(message, status=500), "error")
