"""OpenAI's Responses API on the wire: items in, items out, and the events of a stream.

Items are the turns of a chat: a message and the function calls beside it are one assistant message. Reasoning is an item of its own. One
that comes back is left out: what was sampled here is known here, and other reasoning belongs to another model. What an earlier response
said is known for as long as its rollout lasts (``previous_response_id``); nothing can be retrieved.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.chat.reasoning import CLOSE
from lightning_core.endpoint.dialects.chat_completions import error_body as error_body
from lightning_core.endpoint.dialects.chat_completions import token_logprobs
from lightning_core.endpoint.dialects.chat_shape import check_tools
from lightning_core.endpoint.dialects.dialect import sse
from lightning_core.endpoint.dialects.exchange import Answer, ChatRequest, Choice, Message, Reply, model_name
from lightning_core.endpoint.dialects.fields import (
    NOT_KEPT,
    ONLY_SAMPLED,
    Fields,
    Refusal,
    flag,
    integer,
    objects,
    strings,
    temperature,
    text,
    top_p,
)
from lightning_core.endpoint.dialects.response_format import ANY_TOOL, Demands, check_tool
from lightning_core.endpoint.dialects.response_items import function_tool, items_to_messages
from lightning_core.errors import PolicyRequestError

PATH = "/responses"
KEY_HEADER = "authorization"
PASSED_HEADERS = ("openai-organization", "openai-project", "openai-beta")

_ID = "resp_"

FIELDS = Fields(
    honoured=frozenset({
        "model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "text.format",
        "temperature", "top_p", "max_output_tokens", "stream", "include",
    }),
    inert=frozenset({
        "access_programs", "image", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "reasoning", "safety_identifier", "service_tier", "store", "stream_options", "text.verbosity", "user",
    }),
    refused={
        "background": Refusal("an answer cannot be retrieved later", unless=(False,)),
        "context_management": Refusal("a conversation is never compacted here", unless=([],)),
        "conversation": Refusal(NOT_KEPT),
        "moderation": Refusal("nothing is moderated here"),
        "prompt": Refusal(NOT_KEPT),
        "top_logprobs": Refusal(ONLY_SAMPLED, unless=(0,)),
        "truncation": Refusal("a prompt is never truncated here", unless=("disabled",)),
    },
)  # fmt: skip


def parse_request(body: Mapping[str, Any], *, said: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse_request`."""
    FIELDS.check(body)
    carried = [*_earlier(body, said, check=True), *items_to_messages(body.get("input"), check=True)]
    tools = [function_tool(tool, i, check=True) for i, tool in enumerate(objects(body, "tools"))]
    check_tools(tools)
    instructions = text(body, "instructions")
    flag(body, "parallel_tool_calls")
    strings(body, "include")
    return ChatRequest(
        model=model_name(body),
        messages=[{"role": "system", "content": instructions}, *carried] if instructions else carried,
        prompt_field="input",
        tools=None if body.get("tool_choice") == "none" else tools or None,
        temperature=temperature(body),
        top_p=top_p(body),
        max_tokens=integer(body, "max_output_tokens", 1),
        stream=flag(body, "stream") or False,
        demands=_demands(body, tools),
        carried=carried,
        body=body,
    )


def read_request(body: Mapping[str, Any], *, said: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.read_request`."""
    messages = [*_earlier(body, said, check=False), *items_to_messages(body.get("input"), check=False)]
    instructions = body.get("instructions")
    return ChatRequest(
        model=model_name(body),
        messages=[{"role": "system", "content": instructions}, *messages] if instructions else messages,
        tools=[function_tool(tool, i, check=False) for i, tool in enumerate(objects(body, "tools"))] or None,
        stream=flag(body, "stream") or False,
        body=body,
    )


def _earlier(body: Mapping[str, Any], said: Mapping[str, Sequence[Message]], *, check: bool) -> Sequence[Message]:
    name = text(body, "previous_response_id")
    if name is None:
        return ()
    earlier = said.get(name.removeprefix(_ID))
    if earlier is None and check:
        raise PolicyRequestError(
            f"previous_response_id {name!r} is no response of this rollout", param="previous_response_id"
        )
    return earlier or ()


def _demands(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Demands:
    match body.get("tool_choice"):
        case None | "auto" | "none":
            tool = None
        case "required":
            tool = ANY_TOOL
        case {"type": "function", "name": str(tool)}:
            pass
        case choice:
            raise PolicyRequestError(
                f"tool_choice is {choice!r}; expected 'auto', 'none', 'required' or a function", param="tool_choice"
            )
    match (body.get("text") or {}).get("format"):
        case None | {"type": "text"}:
            schema = None
        case {"type": "json_object"}:
            schema = {}
        case {"type": "json_schema", "schema": dict(schema)}:
            pass
        case form:
            raise PolicyRequestError(
                f"text.format is {form!r}; expected the type text, json_object or json_schema with a schema",
                param="text.format",
            )
    one_call = bool(tools) and body.get("parallel_tool_calls") is False
    return Demands(schema=schema, tool=check_tool(tool, tools), one_call=one_call)


def write_answer(reply: Reply, choices: Sequence[Choice]) -> dict[str, Any]:
    """See `Dialect.write_answer`."""
    (choice,) = choices
    return _response(reply, choice)


def _response(reply: Reply, choice: Choice | None) -> dict[str, Any]:
    """The response object: in progress where there is no ``choice`` yet."""
    asked = reply.request.body
    truncated = choice is not None and choice.finish_reason == "length"
    body: dict[str, Any] = {
        "id": f"{_ID}{reply.call}",
        "object": "response",
        "created_at": int(time.time()),
        "model": reply.model,
        "status": "in_progress" if choice is None else "incomplete" if truncated else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": [] if choice is None else _items(reply, choice),
        "usage": None if choice is None else _usage(reply, choice),
    }
    for name, default in (
        ("instructions", None), ("max_output_tokens", None), ("metadata", {}), ("parallel_tool_calls", True), ("temperature", 1.0),
        ("previous_response_id", None), ("text", {"format": {"type": "text"}}), ("tool_choice", "auto"), ("tools", []), ("top_p", 1.0),
    ):  # fmt: skip
        body[name] = default if asked.get(name) is None else asked[name]
    return body


def _usage(reply: Reply, choice: Choice) -> dict[str, Any]:
    prompt, sampled = reply.prompt_tokens, len(choice.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": _reasoning_tokens(reply, choice)},
        "total_tokens": prompt + sampled,
    }


def _reasoning_tokens(reply: Reply, choice: Choice) -> int:
    """How many tokens were sampled until the reasoning ended."""
    if not choice.message.get("reasoning_content"):
        return 0
    ids = choice.token_ids
    return bisect_left(range(len(ids)), True, key=lambda count: CLOSE in reply.decode(ids[:count]))


def _reasoning(reply: Reply, status: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": f"rs_{reply.call}", "type": "reasoning", "summary": [], "status": status, "content": content}


def _items(reply: Reply, choice: Choice) -> list[dict[str, Any]]:
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    text, calls = choice.message.get("content") or "", choice.message.get("tool_calls") or ()
    items: list[dict[str, Any]] = []
    if reasoning := choice.message.get("reasoning_content"):
        items.append(_reasoning(reply, status, reasoning))
    if text or not calls:
        logprobs = token_logprobs(choice.token_ids, choice.logprobs, reply.decode) if _wants_logprobs(reply) else []
        items.append(_message(reply, status, [_part(text, logprobs)]))
    return [*items, *(_function_call(reply, i, call, status) for i, call in enumerate(calls))]


def _message(reply: Reply, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": f"msg_{reply.call}", "type": "message", "role": "assistant", "status": status, "content": parts}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _function_call(reply: Reply, index: int, call: Mapping[str, Any], status: str) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": f"fc_{reply.call}_{index}",
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": status,
    }


def _wants_logprobs(reply: Reply) -> bool:
    return "message.output_text.logprobs" in (reply.request.body.get("include") or ())


class _Writer:
    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._sent = 0
        self._speaking = False
        self._thoughts = 0
        """1 if there is a reasoning item before the others."""
        self._unsaid: list[dict[str, Any]] = []
        """Logprobs of tokens whose text is held back."""

    def begin(self, index: int) -> bytes:
        started = _response(self._reply, None)
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def think(self, index: int, reasoning: str) -> bytes:
        self._thoughts = 1
        begun, done = (_reasoning(self._reply, s, t) for s, t in (("in_progress", ""), ("completed", reasoning)))
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
        if _wants_logprobs(self._reply):
            self._unsaid += token_logprobs(token_ids, logprobs, self._reply.decode)
        return self._delta(text) if text else b""

    def finish(self, index: int, choice: Choice, rest: str) -> bytes:
        items = _items(self._reply, choice)
        events = b""
        for i, item in enumerate(items):
            if item["type"] == "reasoning":
                continue  # said already
            if item["type"] == "message":
                events += (self._delta(rest) if rest or not self._speaking else b"") + self._end_text(item)
            else:
                started = {**item, "arguments": "", "status": "in_progress"}
                events += self._event("response.output_item.added", output_index=i, item=started)
                written = {"item_id": item["id"], "output_index": i}
                arguments = item["arguments"]
                events += self._event("response.function_call_arguments.delta", **written, delta=arguments)
                events += self._event(
                    "response.function_call_arguments.done", **written, name=item["name"], arguments=arguments
                )
            events += self._event("response.output_item.done", output_index=i, item=item)
        response = _response(self._reply, choice)
        return events + self._event(f"response.{response['status']}", response=response)

    def end(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def _delta(self, text: str) -> bytes:
        events = b""
        if not self._speaking:
            self._speaking = True
            item = _message(self._reply, "in_progress", [])
            events += self._event("response.output_item.added", output_index=self._thoughts, item=item)
            events += self._event("response.content_part.added", **self._place(item), part=_part("", []))
        logprobs, self._unsaid = self._unsaid, []
        place = self._place(_message(self._reply, "in_progress", []))
        return events + self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)

    def _end_text(self, item: Mapping[str, Any]) -> bytes:
        (part,) = item["content"]
        done = self._event(
            "response.output_text.done", **self._place(item), text=part["text"], logprobs=part["logprobs"]
        )
        return done + self._event("response.content_part.done", **self._place(item), part=part)

    def _place(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._thoughts, "content_index": 0}

    def _event(self, kind: str, **more: Any) -> bytes:
        self._sent += 1
        return sse({"type": kind, "sequence_number": self._sent - 1, **more}, kind)


def stream_writer(reply: Reply) -> _Writer:
    """See `Dialect.stream_writer`."""
    return _Writer(reply)


def read_answer(body: Mapping[str, Any]) -> list[Answer]:
    """See `Dialect.read_answer`."""
    if body.get("object") != "response" or body.get("status") not in ("completed", "incomplete"):
        return []
    turns = [m for m in items_to_messages(body.get("output"), check=False) if m["role"] == "assistant"]
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    message = {"role": "assistant", "content": "".join(turn["content"] for turn in turns)}
    counts = body.get("usage") or {}
    return [
        Answer(
            message={**message, "tool_calls": calls} if calls else message,
            finish_reason="length" if body["status"] == "incomplete" else "tool_calls" if calls else "stop",
            model=body.get("model"),
            input_tokens=counts.get("input_tokens"),
            output_tokens=counts.get("output_tokens"),
        )
    ]


class _Reader:
    """The last event of a stream holds the whole response."""

    def __init__(self) -> None:
        self.over = False
        self._response: Mapping[str, Any] = {}

    def read(self, event: Mapping[str, Any]) -> None:
        if event.get("type") in ("response.completed", "response.incomplete"):
            self._response = event.get("response") or {}
            self.over = True

    def answers(self) -> list[Answer]:
        return read_answer(self._response)


def stream_reader() -> _Reader:
    """See `Dialect.stream_reader`."""
    return _Reader()


def error_event(message: str) -> bytes:
    """See `Dialect.error_event`. The client raises where it finds an ``error``; the rest is the event as the API describes it."""
    body = error_body(message, status=500)
    return sse({"type": "error", "code": "server_error", "message": message, "param": None, **body}, "error")
