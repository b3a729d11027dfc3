"""Writes a system prompt and demonstrations into the body of a request, in each wire format with a chat.

A later turn of a conversation gets the same text in the same place, so its prompt still begins with the earlier one. Bodies
whose messages are not a list are left as they are: their dialect reports them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

RequestBody = Mapping[str, Any]
_SYSTEM_ROLES = ("system", "developer")


class Insertion(NamedTuple):
    """What is written into a request."""

    text: str | None
    """Text of the system prompt; None: the agent's stays."""
    replaces: bool
    """Whether ``text`` replaces the agent's system prompt; otherwise it is appended."""
    messages: Sequence[Mapping[str, Any]]
    """Messages before the agent's own, as in chat completions."""


def _chat(body: RequestBody, insertion: Insertion) -> RequestBody:
    messages = body.get("messages")
    return {**body, "messages": insert_messages(messages, insertion)} if isinstance(messages, list) else body


def insert_messages(messages: Sequence[Any], insertion: Insertion) -> list[Any]:
    """``messages`` of chat completions with the insertion."""
    start = _leading(messages)
    leading, rest = list(messages[:start]), messages[start:]
    text = insertion.text
    if text is not None:
        first = leading[0] if leading else {"role": "system"}
        if insertion.replaces or not leading:
            leading = [{**first, "content": text}]
        else:
            leading[-1] = {**leading[-1], "content": _append(leading[-1].get("content"), text)}
    return [*leading, *insertion.messages, *rest]


def _responses(body: RequestBody, insertion: Insertion) -> RequestBody:
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        return body
    listed = cast("list[Any]", items)
    start = _leading(listed)
    leading, rest = listed[:start], listed[start:]
    if insertion.text is not None:
        # Always in instructions, since a response that is continued by its id keeps the items, but not the instructions.
        before = None if insertion.replaces else body.get("instructions")
        body = {**body, "instructions": _append(before, insertion.text)}
        if insertion.replaces:
            leading = [item for item in leading if item.get("type", "message") != "message"]
    # The conversation so far has the demonstrations.
    continues = body.get("previous_response_id") is not None or body.get("conversation") is not None
    more = [] if continues else [item for message in insertion.messages for item in _items(message)]
    return {**body, "input": [*leading, *more, *rest]}


def _items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls", ())
    ]
    said = [{"role": message["role"], "content": message["content"]}] if message["content"] or not calls else []
    return [*said, *calls]


def _anthropic(body: RequestBody, insertion: Insertion) -> RequestBody:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    listed = cast("list[Any]", messages)
    start = _leading(listed)
    leading, rest = listed[:start], listed[start:]
    if insertion.text is not None:
        before = None if insertion.replaces else body.get("system")
        body = {**body, "system": _append(before, insertion.text)}
        leading = [] if insertion.replaces else leading
    return {**body, "messages": [*leading, *_turns(insertion.messages, _block_turn), *rest]}


def _block_turn(message: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    if message["role"] == "tool":
        return "user", [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": _arguments(call)}
        for call in message.get("tool_calls", ())
    ]
    said = [{"type": "text", "text": message["content"]}] if message["content"] or not calls else []
    return message["role"], [*said, *calls]


def _gemini(body: RequestBody, insertion: Insertion) -> RequestBody:
    contents = body.get("contents")
    if not isinstance(contents, list):
        return body
    if insertion.text is not None:
        key = "system_instruction" if "system_instruction" in body else "systemInstruction"
        before: Any = None if insertion.replaces else body.get(key)
        parts = before.get("parts") if isinstance(before, Mapping) else None
        added = f"\n\n{insertion.text}" if parts else insertion.text
        body = {**body, key: {**(before or {}), "parts": [*(parts or ()), {"text": added}]}}
    demonstrations = _turns(insertion.messages, _part_turn, content="parts")
    return {**body, "contents": [*demonstrations, *cast("list[Any]", contents)]}


def _part_turn(message: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    if message["role"] == "tool":
        # Results without ids belong to the calls of their function in order.
        return "user", [
            {"functionResponse": {"name": message["name"], "response": _result(message["content"])}},
        ]
    calls = [
        {"functionCall": {"name": call["function"]["name"], "args": _arguments(call)}}
        for call in message.get("tool_calls", ())
    ]
    said = [{"text": message["content"]}] if message["content"] or not calls else []
    return "model" if message["role"] == "assistant" else "user", [*said, *calls]


def _turns(
    messages: Sequence[Mapping[str, Any]],
    write: Callable[[Mapping[str, Any]], tuple[str, list[dict[str, Any]]]],
    *,
    content: str = "content",
) -> list[dict[str, Any]]:
    """``messages`` as turns of alternating roles: the results of all calls of a turn are in one."""
    turns: list[dict[str, Any]] = []
    names = {call["id"]: call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    for message in messages:
        role, parts = write({**message, "name": names.get(message.get("tool_call_id", ""), "")})
        if turns and turns[-1]["role"] == role:
            turns[-1][content] += parts
        else:
            turns.append({"role": role, content: parts})
    return turns


def _leading(messages: Sequence[Any]) -> int:
    """The number of system messages at the start."""
    return next((i for i, m in enumerate(messages) if not _is_system(m)), len(messages))


def _is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and cast("Any", message).get("role") in _SYSTEM_ROLES


def _append(content: Any, text: str) -> Any:
    """``text`` after ``content``, a text or a list of text parts."""
    if isinstance(content, list) and content:
        return [*cast("list[Any]", content), {"type": "text", "text": f"\n\n{text}"}]
    return f"{content}\n\n{text}" if isinstance(content, str) and content else text


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        arguments = None
    return (
        cast("dict[str, Any]", arguments)
        if isinstance(arguments, dict)
        else {"arguments": call["function"]["arguments"]}
    )


def _result(text: str) -> dict[str, Any]:
    try:
        result = json.loads(text)
    except ValueError:
        result = None
    return cast("dict[str, Any]", result) if isinstance(result, dict) else {"result": text}


WIRE_FORMATS: Mapping[str, Callable[[RequestBody, Insertion], RequestBody]] = {
    "/chat/completions": _chat,
    "/responses": _responses,
    "/messages": _anthropic,
    "/models/{model}:generateContent": _gemini,
}
"""The writer of each wire format, by the path of its dialect."""
