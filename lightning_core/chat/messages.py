"""Normalizes the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.chat.json_text import show_json
from lightning_core.chat.tool_calls.nesting import read_arguments
from lightning_core.errors import PolicyRequestError

Message = Mapping[str, Any]

READS_TEXT = (
    "the model reads text only. Describe images, audio and files in text, or put the agent under agents.frozen with a model of its "
    "provider, which gets them as they are"
)
"""The error for other parts, with advice."""

_BEFORE, EXCERPT_AFTER = 20, 40
"""Characters of an excerpt before and after its index."""
_KEPT = ("role", "name", "tool_call_id", "tool_calls")


def check_message(message: Any, index: int) -> dict[str, Any]:
    """The message as templates read it: content as a string, arguments as objects.

    Raises `PolicyRequestError` for messages that are not supported.
    """
    where = f"messages.{index}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PolicyRequestError(f"{where} is {show_json(message)}; expected an object with a role", param=where)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_part(part, f"{where}.content.{i}") for i, part in enumerate(content))
    if content is not None and not isinstance(content, str):
        raise PolicyRequestError(
            f"{where}.content is {show_json(content)}; expected a string or text parts", param=where
        )
    checked = {k: v for k, v in message.items() if v is not None and k in _KEPT}
    if checked["role"] == "assistant" and isinstance(refusal := message.get("refusal"), str):
        content = f"{content or ''}{refusal}"
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
    match part:
        case {"type": "text" | "input_text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case _:
            raise PolicyRequestError(f"{where} is {show_json(part)}; expected a text part: {READS_TEXT}", param=where)


def _check_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PolicyRequestError(
            f"{where} has the tool call {show_json(call)}; expected an object with a function, its name and arguments",
            param=where,
        )
    known = {"name": function["name"], "arguments": function.get("arguments")}
    identifier = {"id": call["id"]} if call.get("id") is not None else {}
    return loads_arguments({"type": "function", **identifier, "function": known})


def loads_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """``call`` with its arguments parsed from JSON, as templates expect them."""
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": read_arguments(function["arguments"])}}
    except (ValueError, KeyError, TypeError):
        return {**call}


def extend_system(messages: list[dict[str, Any]], more: str) -> list[dict[str, Any]]:
    """``messages`` with ``more`` at the end of the system message, which may be new."""
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else (None, messages)
    content = f"{first['content']}\n\n{more}" if first and first["content"] else more
    return [{**(first or {"role": "system"}), "content": content}, *rest]


def remove_from_system(messages: Sequence[Message], more: str) -> tuple[Message, ...]:
    """``messages`` before `extend_system` added ``more``; without the system message if it had no other text."""
    if not more:
        return tuple(messages)
    content = text_of(messages[0]).removesuffix(more).removesuffix("\n\n")
    return (*([{**messages[0], "content": content}] if content else []), *messages[1:])


def text_of(message: Message) -> str:
    """The content of a message, or ""."""
    return message.get("content") or ""


def thought_of(message: Message) -> str:
    """The reasoning of a message without outer white space, or ""."""
    return (message.get("reasoning_content") or "").strip()


def functions_of(message: Message) -> list[Any]:
    """Names and arguments of the tool calls of a message."""
    return [loads_arguments(call).get("function") for call in message.get("tool_calls") or ()]


def compared(message: Message) -> list[Any]:
    """The parts of ``message`` that tell it from others at its place in a conversation.

    Without the ids of its calls, white space around a response, the form of arguments, reasoning, which clients leave out, and the name
    of an assistant message, which LangChain adds.
    """
    is_response = message["role"] == "assistant"
    content = text_of(message)
    return [
        message["role"],
        content.strip() if is_response else content,
        functions_of(message),
        None if is_response else message.get("name"),
        message.get("tool_call_id"),
    ]


def with_calls(message: Message) -> str:
    """The text of ``message`` and its tool calls."""
    calls = functions_of(message)
    return f"{text_of(message).strip()}{json.dumps(calls, ensure_ascii=False) if calls else ''}"


def excerpt(text: str, at: int) -> str:
    """``text`` around the index ``at``, quoted."""
    start, end = max(0, at - _BEFORE), at + EXCERPT_AFTER
    return f"'{'…' * (start > 0)}{' '.join(text[start:end].split())}{'…' * (end < len(text))}'"
