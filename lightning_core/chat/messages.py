"""The messages of a chat before they are rendered: checked, of one shape, and recognised when they come again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from lightning_core.errors import PolicyRequestError

Message = Mapping[str, Any]

_KEPT = ("role", "name", "tool_call_id", "tool_calls")


def check_message(message: Any, index: int) -> dict[str, Any]:
    """One message with its content as a plain string, or the `PolicyRequestError` that says what is wrong with it."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PolicyRequestError(f"{where} is {message!r}; expected an object with a role", param=where)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_part(part, where) for part in content)
    if content is not None and not isinstance(content, str):
        raise PolicyRequestError(f"{where}.content is {content!r}; expected a string or text parts", param=where)
    checked = {k: v for k, v in message.items() if v is not None and k in _KEPT}
    if checked["role"] == "developer":
        checked["role"] = "system"
    reasoning = message.get("reasoning_content")
    if checked["role"] == "assistant" and isinstance(reasoning, str) and reasoning:
        checked["reasoning_content"] = reasoning
    if not checked.get("tool_calls", True):
        del checked["tool_calls"]
    if "tool_calls" in checked:
        checked["tool_calls"] = [_check_call(call, where) for call in checked["tool_calls"]]
    return {**checked, "content": content or ""}


def _part(part: Any, where: str) -> str:
    if (
        not isinstance(part, Mapping)
        or part.get("type") not in ("text", "input_text")
        or not isinstance(part.get("text"), str)
    ):
        raise PolicyRequestError(f"{where} has a content part {part!r}; this model reads text parts only", param=where)
    return part["text"]


def _check_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PolicyRequestError(
            f"{where} has the tool call {call!r}; expected an object with a function, its name and arguments",
            param=where,
        )
    # Some templates write down the type, which clients may leave out.
    return loads_arguments({"type": "function", **call})


def loads_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """``call`` with its arguments as an object, as templates expect them; the API sends them as a JSON string."""
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, KeyError, TypeError):
        return {**call}


def extend_system(messages: list[dict[str, Any]], more: str) -> list[dict[str, Any]]:
    """``messages``, whose system message ends with ``more``; it is made where there is none."""
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else (None, messages)
    content = f"{first['content']}\n\n{more}" if first and first["content"] else more
    return [{**(first or {"role": "system"}), "content": content}, *rest]


def text_of(message: Message) -> str:
    """The content of a message; empty where there is none."""
    return message.get("content") or ""


def functions_of(message: Message) -> list[Any]:
    """Names and arguments of a message's tool calls."""
    return [loads_arguments(call).get("function") for call in message.get("tool_calls") or ()]


def keys(messages: Sequence[Message], setting: str) -> list[str]:
    """For each message a key of the conversation up to it, under ``setting`` (its tools and demands).

    It is the same whatever ids the calls have, and whether a response was stripped, or its arguments serialised in another way. Its
    reasoning does not count, since clients leave it out, nor its name, which LangChain puts in.
    """
    found: list[str] = []
    state = blake2b(setting.encode(), digest_size=16)
    for message in messages:
        ours = message["role"] == "assistant"
        content = text_of(message)
        parts = [
            message["role"],
            content.strip() if ours else content,
            functions_of(message),
            None if ours else message.get("name"),
            message.get("tool_call_id"),
        ]
        state.update(json.dumps(parts, sort_keys=True).encode())
        found.append(state.hexdigest())
    return found
