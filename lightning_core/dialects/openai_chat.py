"""The wire format of OpenAI's chat completions.

``return_token_ids`` is vLLM's extension.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_core.chat.json_text import show_json
from lightning_core.chat.messages import Message
from lightning_core.dialects.dialect import sse
from lightning_core.dialects.exchange import ChatRequest, Choice, ResponseContext, UpstreamResponse, model_name
from lightning_core.dialects.fields import (
    NO_SEARCH,
    OBJECT,
    ONLY_SAMPLED,
    TEXT_ONLY,
    DroppedField,
    Fields,
    UnsupportedField,
    flag,
    integer,
    objects,
    seed,
    stops,
    temperature,
    top_p,
)
from lightning_core.dialects.logprobs import token_logprobs
from lightning_core.dialects.openai_chat_shape import (
    CUSTOM_TOOL,
    MESSAGES,
    PARTS,
    TOOL,
    TOOL_CALL,
    TOOL_CHOICES,
    check_messages,
    check_tools,
    function_tool,
    read_tool_choice,
    with_custom,
    with_functions,
)
from lightning_core.dialects.openai_sampler import GUIDED, SAMPLER
from lightning_core.dialects.requirements import OutputRequirements, read_form
from lightning_core.dialects.thinking import Settings, effort, switch, thinking
from lightning_core.dialects.usage import openai_chat_tokens
from lightning_core.errors import PolicyRequestError

PATH = "/chat/completions"
KEY_HEADER = "authorization"
FORWARDED_HEADERS = ("openai-organization", "openai-project")

_ERRORS = {401: "authentication_error", 429: "rate_limit_error"}

FIELDS = Fields(
    supported=frozenset({
        "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "max_tokens", "max_completion_tokens",
        "n", "stop", "stream", "stream_options.include_usage", "seed", "logprobs", "response_format", "return_token_ids",
        "chat_template_kwargs", "reasoning_effort", "enable_thinking", "thinking.type",
    }),
    ignored=frozenset({
        "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "stream_options.include_obfuscation", "thinking.budget_tokens", "user", "verbosity",
    }),
    dropped={
        **SAMPLER,
        "moderation": DroppedField("the endpoint does not moderate", kind=OBJECT),
        "web_search_options": DroppedField(NO_SEARCH, kind=OBJECT),
    },
    refused={
        **GUIDED,
        "audio": UnsupportedField(TEXT_ONLY),
        "modalities": UnsupportedField(TEXT_ONLY, unless=(["text"], [])),
        "top_logprobs": UnsupportedField(ONLY_SAMPLED, unless=(0,)),
        "functions": UnsupportedField("use tools", unless=([],)),
        "function_call": UnsupportedField("use tool_choice", unless=("none",)),
    },
)  # fmt: skip


RESPONSE_FORMATS = {
    "text": Fields(supported=frozenset({"type"})),
    "json_object": Fields(supported=frozenset({"type"})),
    "json_schema": Fields(
        supported=frozenset({"type", "json_schema.schema", "json_schema.description"}),
        ignored=frozenset({"json_schema.name", "json_schema.strict"}),
    ),
}

NESTED = {
    **{f"messages.N ({role})": fields for role, fields in MESSAGES.items()},
    **{f"messages.N.content.N ({kind})": fields for kind, fields in PARTS.items()},
    "messages.N.tool_calls.N": TOOL_CALL,
    "tools.N": TOOL,
    "tools.N (custom)": CUSTOM_TOOL,
    **{f"tool_choice ({kind})": fields for kind, fields in TOOL_CHOICES.items()},
    **{f"response_format ({kind})": fields for kind, fields in RESPONSE_FORMATS.items()},
}


def parse_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse_request`."""
    FIELDS.check(body)
    request = read_request(body, conversations=conversations)
    tools = [function_tool(tool, i) for i, tool in enumerate(objects(body, "tools"))]
    messages = with_functions(request.messages)
    check_messages(messages)
    check_tools(tools)
    shown, tool = read_tool_choice(body, tools)
    for name in ("logprobs", "return_token_ids", "parallel_tool_calls"):
        flag(body, name)
    wants_usage(body)
    return replace(
        request,
        messages=messages,
        tools=shown or None,
        temperature=temperature(body),
        top_p=top_p(body),
        max_tokens=_max_tokens(body),
        stop=stops(body, "stop", one=True),
        seed=seed(body),
        requirements=OutputRequirements(
            **read_form(body.get("response_format"), "response_format", RESPONSE_FORMATS, inner="json_schema"),
            tool=tool,
            one_call=bool(shown) and body.get("parallel_tool_calls") is False,
        ),
        template_settings=_template_settings(body),
    )


def read_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.read_request`."""
    del conversations
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise PolicyRequestError(f"messages is {show_json(messages)}; expected a list", param="messages")
    return ChatRequest(
        model=model_name(body),
        messages=messages,
        tools=body.get("tools") or None,
        n=integer(body, "n", 1) or 1,
        stream=flag(body, "stream") or False,
        body=body,
    )


def _template_settings(body: Mapping[str, Any]) -> Settings:
    variables = body.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise PolicyRequestError(
            f"chat_template_kwargs is {show_json(variables)}; expected an object", param="chat_template_kwargs"
        )
    named = {f"chat_template_kwargs.{name}": {name: value} for name, value in (variables or {}).items()}
    switched = switch(body, "enable_thinking", on=flag(body, "enable_thinking"))
    return {**effort(body, "reasoning_effort"), **thinking(body), **switched, **named}


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    most, older = (integer(body, name, 1) for name in ("max_completion_tokens", "max_tokens"))
    if most is not None and older is not None and most != older:
        raise PolicyRequestError(
            f"max_completion_tokens is {most} and max_tokens is {older}; expected one of them, or equal values",
            param="max_tokens",
        )
    return most or older


def write_response(context: ResponseContext, choices: Sequence[Choice]) -> dict[str, Any]:
    """See `Dialect.write_response`."""
    options = context.request.body
    body: dict[str, Any] = {
        **_head(context, "chat.completion"),
        "choices": [
            {
                "index": i,
                "message": with_custom(choice.message, options.get("tools")),
                "finish_reason": choice.reason,
                "logprobs": _logprobs(context, choice.token_ids, choice.logprobs),
                **({"token_ids": choice.token_ids} if options.get("return_token_ids") else {}),
            }
            for i, choice in enumerate(choices)
        ],
        **usage_field(context, choices),
    }
    if options.get("return_token_ids"):
        body["prompt_token_ids"] = list(context.prompts[0])
    return body


def _logprobs(context: ResponseContext, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
    wanted = context.request.body.get("logprobs")
    return {"content": token_logprobs(token_ids, logprobs, context.bytes_of), "refusal": None} if wanted else None


class _Writer:
    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._options = context.request.body

    def begin(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def think(self, index: int, reasoning: str) -> bytes:
        return self._chunk(index, {"reasoning_content": reasoning})

    def more(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
        extra: dict[str, Any] = {}
        if self._options.get("logprobs"):
            extra["logprobs"] = _logprobs(self._context, token_ids, logprobs)
        if self._options.get("return_token_ids"):
            extra["token_ids"] = list(token_ids)
        return self._chunk(index, {"content": text}, **extra) if text or extra else b""

    def finish(self, index: int, choice: Choice, rest: str) -> bytes:
        events = self._chunk(index, {"content": rest}) if rest else b""
        if choice.message.get("tool_calls"):
            message = with_custom(choice.message, self._options.get("tools"))
            calls = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            events += self._chunk(index, {"tool_calls": calls})
        return events + self._chunk(index, {}, finish_reason=choice.reason)

    def end(self, choices: Sequence[Choice]) -> bytes:
        events = b""
        if wants_usage(self._options) and (counts := usage_field(self._context, choices)):
            events = sse({**_head(self._context, "chat.completion.chunk"), "choices": [], **counts})
        return events + sse("[DONE]")

    def _chunk(self, index: int, delta: Mapping[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        usage_comes = {"usage": None} if wants_usage(self._options) else {}
        return sse({**_head(self._context, "chat.completion.chunk"), "choices": [choice], **usage_comes})


def stream_writer(context: ResponseContext) -> _Writer:
    """See `Dialect.stream_writer`."""
    return _Writer(context)


def _head(context: ResponseContext, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{context.call}", "object": kind, "created": int(time.time()), "model": context.model}


def wants_usage(options: Mapping[str, Any]) -> bool:
    """Whether a stream ends with the token counts.

    Raises `PolicyRequestError` if that is not a boolean.
    """
    name = "stream_options.include_usage"
    return flag({name: (options.get("stream_options") or {}).get("include_usage")}, name) or False


def usage_field(context: ResponseContext, choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts as chat completions and completions write them; empty for a response without."""
    if not context.reports_usage:
        return {}
    prompt, sampled = context.prompt_tokens, context.output_tokens(choices)
    cached = {"prompt_tokens_details": {"cached_tokens": context.cached_tokens}} if context.cached_tokens else {}
    counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return {"usage": {**counts, **cached}}


def read_response(body: Mapping[str, Any]) -> list[UpstreamResponse]:
    """See `Dialect.read_response`."""
    return [
        UpstreamResponse(
            message=choice.get("message") or {},
            finish_reason=choice.get("finish_reason"),
            model=body.get("model"),
            **openai_chat_tokens(body.get("usage"), i),
        )
        for i, choice in enumerate(body.get("choices") or ())
    ]


class _Reader:
    """Assembles the chunks into the body of a response without streaming."""

    def __init__(self) -> None:
        self.over = False
        self._body: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def read(self, event: Mapping[str, Any]) -> None:
        for name in ("model", "usage"):
            self._body[name] = event.get(name) or self._body.get(name)
        for part in event.get("choices") or ():
            choice = self._choices.setdefault(part.get("index", 0), {"message": {"role": "assistant", "content": ""}})
            message, delta = choice["message"], part.get("delta") or {}
            choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                _extend_call(message.setdefault("tool_calls", []), call)

    def responses(self) -> list[UpstreamResponse]:
        choices = [choice for _, choice in sorted(self._choices.items())]
        complete = all(choice["finish_reason"] for choice in choices)
        return read_response({**self._body, "choices": choices}) if complete else []


def _extend_call(calls: list[dict[str, Any]], delta: Mapping[str, Any]) -> None:
    """Add a streamed part of a tool call to ``calls``."""
    index = delta.get("index", len(calls))
    kind, text = ("custom", "input") if "custom" in delta else ("function", "arguments")
    while len(calls) <= index:
        calls.append({"id": None, "type": kind, kind: {"name": "", text: ""}})
    call, part = calls[index], delta.get(kind) or {}
    call["id"] = delta.get("id") or call["id"]
    for name in ("name", text):
        call[kind][name] += part.get(name) or ""


def stream_reader() -> _Reader:
    """See `Dialect.stream_reader`."""
    return _Reader()


def error_body(message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
    """See `Dialect.error_body`."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def error_event(message: str) -> bytes:
    """See `Dialect.error_event`."""
    return sse(error_body(message, status=500))
