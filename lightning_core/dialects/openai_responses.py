"""The wire format of OpenAI's Responses API: request fields, responses and stream events.

Items are the turns of a chat: a message and the function calls beside it are one assistant message. ``previous_response_id`` names a
response of the same rollout; responses cannot be retrieved. A history has the messages, and the items that define tools: those at the
start of the conversation before its messages, later ones after the messages of their request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.chat.json_text import show_json
from lightning_core.chat.messages import Message
from lightning_core.dialects.dialect import sse
from lightning_core.dialects.exchange import (
    ChatRequest,
    Choice,
    ResponseContext,
    UpstreamResponse,
    model_name,
)
from lightning_core.dialects.fields import (
    LIST,
    NOT_STORED,
    OBJECT,
    ONLY_SAMPLED,
    TEXT,
    DroppedField,
    Fields,
    UnsupportedField,
    flag,
    integer,
    strings,
    temperature,
    text,
    top_p,
)
from lightning_core.dialects.logprobs import token_logprobs
from lightning_core.dialects.openai_chat import error_body as error_body
from lightning_core.dialects.openai_chat_shape import check_tools
from lightning_core.dialects.openai_responses_items import (
    INCLUDED,
    LOGPROBS,
    items_to_messages,
    read_requirements,
    read_tool_choice,
)
from lightning_core.dialects.openai_responses_items import NESTED as NESTED
from lightning_core.dialects.openai_responses_tools import (
    call_events,
    call_item,
    later_tools,
    leading_tools,
    recorded_tools,
    request_tools,
    shown_tools,
    without_tools,
)
from lightning_core.dialects.thinking import effort
from lightning_core.dialects.usage import openai_responses_tokens
from lightning_core.errors import PolicyRequestError

PATH = "/responses"
KEY_HEADER = "authorization"
FORWARDED_HEADERS = ("openai-organization", "openai-project", "openai-beta")

_ID = "resp_"

FIELDS = Fields(
    supported=frozenset({
        "model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "text.format",
        "temperature", "top_p", "max_output_tokens", "stream", "include", "reasoning.effort",
    }),
    ignored=frozenset({
        "access_programs", "client_metadata", "image", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "reasoning.context", "reasoning.generate_summary", "reasoning.mode",
        "reasoning.summary", "safety_identifier", "service_tier", "store", "stream_options.include_obfuscation", "text.verbosity", "user",
    }),
    dropped={
        "context_management": DroppedField("a conversation is never compacted", unless=([],), kind=LIST),
        "moderation": DroppedField("the endpoint does not moderate", kind=OBJECT),
        "truncation": DroppedField("a prompt is never truncated", unless=("disabled",), kind=TEXT),
    },
    refused={
        "background": UnsupportedField("a response cannot be retrieved later", unless=(False,)),
        "conversation": UnsupportedField(NOT_STORED),
        "prompt": UnsupportedField(NOT_STORED),
        "top_logprobs": UnsupportedField(ONLY_SAMPLED, unless=(0,)),
    },
)  # fmt: skip


def parse_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse_request`."""
    FIELDS.check(body)
    earlier = _earlier(body, conversations, check=True)
    leading = leading_tools(body)
    added = items_to_messages(body.get("input"), check=True, earlier=earlier, skip=len(leading))
    history = [*earlier, *leading, *added, *later_tools(body)]
    messages = without_tools(history)
    tools, later = shown_tools(body, earlier)
    check_tools(tools)
    tools, later, tool = read_tool_choice(body, tools, later)
    instructions = text(body, "instructions")
    flag(body, "parallel_tool_calls")
    if unknown := set(strings(body, "include")) - INCLUDED:
        raise PolicyRequestError(
            f"include has {show_json(sorted(unknown))}; expected only names in {sorted(INCLUDED)!r}", param="include"
        )
    return ChatRequest(
        model=model_name(body),
        messages=[{"role": "system", "content": instructions}, *messages] if instructions else messages,
        input_field="input",
        tools=tools or None,
        later_tools=later,
        temperature=temperature(body),
        top_p=top_p(body),
        max_tokens=integer(body, "max_output_tokens", 1),
        stream=flag(body, "stream") or False,
        requirements=read_requirements(body, tool=tool, has_tools=bool(tools or later)),
        template_settings=effort(body.get("reasoning") or {}, "effort", "reasoning"),
        history=history,
        body=body,
    )


def read_request(body: Mapping[str, Any], *, conversations: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.read_request`."""
    added = items_to_messages(body.get("input"), check=False, skip=len(leading_tools(body)))
    history = [*_earlier(body, conversations, check=False), *added]
    messages = without_tools(history)
    instructions = body.get("instructions")
    return ChatRequest(
        model=model_name(body),
        messages=[{"role": "system", "content": instructions}, *messages] if instructions else messages,
        tools=recorded_tools(body) or None,
        stream=flag(body, "stream") or False,
        history=history,
        body=body,
    )


def _earlier(
    body: Mapping[str, Any], conversations: Mapping[str, Sequence[Message]], *, check: bool
) -> Sequence[Message]:
    name = text(body, "previous_response_id")
    if name is None:
        return ()
    earlier = conversations.get(name.removeprefix(_ID))
    if earlier is None and check:
        raise PolicyRequestError(
            f"previous_response_id is {show_json(name)}; expected the id of an earlier response of this rollout",
            param="previous_response_id",
        )
    return earlier or ()


def write_response(context: ResponseContext, choices: Sequence[Choice]) -> dict[str, Any]:
    """See `Dialect.write_response`."""
    (choice,) = choices
    return _response(context, choice)


def _response(context: ResponseContext, choice: Choice | None) -> dict[str, Any]:
    """The response object, in progress if there is no ``choice`` yet."""
    options = context.request.body
    truncated = choice is not None and choice.reason == "length"
    body: dict[str, Any] = {
        "id": f"{_ID}{context.call}",
        "object": "response",
        "created_at": int(time.time()),
        "model": context.model,
        "status": "in_progress" if choice is None else "incomplete" if truncated else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": [] if choice is None else _items(context, choice),
        "usage": None if choice is None else _usage(context, choice),
    }
    for name, default in (
        ("instructions", None), ("max_output_tokens", None), ("metadata", {}), ("parallel_tool_calls", True), ("temperature", 1.0),
        ("previous_response_id", None), ("text", {"format": {"type": "text"}}), ("tool_choice", "auto"), ("tools", []), ("top_p", 1.0),
    ):  # fmt: skip
        body[name] = default if options.get(name) is None else options[name]
    return body


def _usage(context: ResponseContext, choice: Choice) -> dict[str, Any]:
    prompt, sampled = context.prompt_tokens, context.output_tokens([choice])
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": context.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": _reasoning_tokens(context, choice)},
        "total_tokens": prompt + sampled,
    }


def _reasoning_tokens(context: ResponseContext, choice: Choice) -> int:
    """The number of tokens sampled before the end of the reasoning."""
    if not choice.message.get("reasoning_content"):
        return 0
    ids = choice.token_ids
    return bisect_left(range(len(ids)), True, key=lambda count: context.answered(ids[:count]))


def _reasoning(context: ResponseContext, status: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": f"rs_{context.call}", "type": "reasoning", "summary": [], "status": status, "content": content}


def _items(context: ResponseContext, choice: Choice) -> list[dict[str, Any]]:
    status = "incomplete" if choice.reason == "length" else "completed"
    text, calls = choice.message.get("content") or "", choice.message.get("tool_calls") or ()
    items: list[dict[str, Any]] = []
    if reasoning := choice.message.get("reasoning_content"):
        items.append(_reasoning(context, status, reasoning))
    if text or not calls:
        logprobs = (
            token_logprobs(choice.token_ids, choice.logprobs, context.bytes_of) if _wants_logprobs(context) else []
        )
        items.append(_message(context, status, [_part(text, logprobs)]))
    request = context.request
    tools = request_tools(request.body, check=False, earlier=request.history or ()) if calls else ()
    return [
        *items,
        *(call_item(call, tools, id=f"{context.call}_{i}", status=status) for i, call in enumerate(calls)),
    ]


def _message(context: ResponseContext, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": f"msg_{context.call}", "type": "message", "role": "assistant", "status": status, "content": parts}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _wants_logprobs(context: ResponseContext) -> bool:
    return LOGPROBS in (context.request.body.get("include") or ())


class _Writer:
    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._sequence = 0
        self._text_started = False
        self._reasoning_items = 0
        """1 if there is a reasoning item before the others, otherwise 0."""
        self._held_logprobs: list[dict[str, Any]] = []
        """Logprobs of tokens whose text is not sent yet."""

    def begin(self, index: int) -> bytes:
        started = _response(self._context, None)
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def think(self, index: int, reasoning: str) -> bytes:
        self._reasoning_items = 1
        begun, done = (_reasoning(self._context, s, t) for s, t in (("in_progress", ""), ("completed", reasoning)))
        place = {"item_id": done["id"], "output_index": 0, "content_index": 0}
        empty = {"type": "reasoning_text", "text": ""}
        return b"".join((
            self._event("response.output_item.added", output_index=0, item=begun),
            self._event("response.content_part.added", **place, part=empty),
            self._event("response.reasoning_text.delta", **place, delta=reasoning),
            self._event("response.reasoning_text.done", **place, text=reasoning),
            self._event("response.content_part.done", **place, part={**empty, "text": reasoning}),
            self._event("response.output_item.done", output_index=0, item=done),
        ))  # fmt: skip

    def more(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
        if _wants_logprobs(self._context):
            self._held_logprobs += token_logprobs(token_ids, logprobs, self._context.bytes_of)
        return self._delta(text) if text else b""

    def finish(self, index: int, choice: Choice, rest: str) -> bytes:
        items = _items(self._context, choice)
        events = b""
        for i, item in enumerate(items):
            if item["type"] == "reasoning":
                continue  # already sent
            if item["type"] == "message":
                events += (self._delta(rest) if rest or not self._text_started else b"") + self._end_text(item)
            else:
                events += b"".join(self._event(kind, **more) for kind, more in call_events(item, i))
            events += self._event("response.output_item.done", output_index=i, item=item)
        response = _response(self._context, choice)
        return events + self._event(f"response.{response['status']}", response=response)

    def end(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def _delta(self, text: str) -> bytes:
        events = b""
        if not self._text_started:
            self._text_started = True
            item = _message(self._context, "in_progress", [])
            events += self._event("response.output_item.added", output_index=self._reasoning_items, item=item)
            events += self._event("response.content_part.added", **self._place(item), part=_part("", []))
        logprobs, self._held_logprobs = self._held_logprobs, []
        place = self._place(_message(self._context, "in_progress", []))
        return events + self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)

    def _end_text(self, item: Mapping[str, Any]) -> bytes:
        (part,) = item["content"]
        done = self._event(
            "response.output_text.done", **self._place(item), text=part["text"], logprobs=part["logprobs"]
        )
        return done + self._event("response.content_part.done", **self._place(item), part=part)

    def _place(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._reasoning_items, "content_index": 0}

    def _event(self, kind: str, **more: Any) -> bytes:
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence - 1, **more}, kind)


def stream_writer(context: ResponseContext) -> _Writer:
    """See `Dialect.stream_writer`."""
    return _Writer(context)


def read_response(body: Mapping[str, Any]) -> list[UpstreamResponse]:
    """See `Dialect.read_response`."""
    if body.get("object") != "response" or body.get("status") not in ("completed", "incomplete"):
        return []
    turns = [m for m in items_to_messages(body.get("output"), check=False) if m["role"] == "assistant"]
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    message = {"role": "assistant", "content": "".join(turn["content"] for turn in turns)}
    return [
        UpstreamResponse(
            message={**message, "tool_calls": calls} if calls else message,
            finish_reason=_finish_reason(body, calls),
            model=body.get("model"),
            conversation=name.removeprefix(_ID) if isinstance(name := body.get("id"), str) else None,
            **openai_responses_tokens(body.get("usage")),
        )
    ]


def _finish_reason(body: Mapping[str, Any], calls: Sequence[Any]) -> str:
    if body["status"] == "incomplete":
        reason = (body.get("incomplete_details") or {}).get("reason")
        return "length" if reason in (None, "max_output_tokens") else str(reason)
    return "tool_calls" if calls else "stop"


class _Reader:
    """Reads the last event of a stream, which has the whole response."""

    def __init__(self) -> None:
        self.over = False
        self._response: Mapping[str, Any] = {}

    def read(self, event: Mapping[str, Any]) -> None:
        if event.get("type") in ("response.completed", "response.incomplete"):
            self._response = event.get("response") or {}
            self.over = True

    def responses(self) -> list[UpstreamResponse]:
        return read_response(self._response)


def stream_reader() -> _Reader:
    """See `Dialect.stream_reader`."""
    return _Reader()


def error_event(message: str) -> bytes:
    """See `Dialect.error_event`.

    ``error`` makes the client raise; the rest is the documented event.
    """
    body = error_body(message, status=500)
    return sse({"type": "error", "code": "server_error", "message": message, "param": None, **body}, "error")
