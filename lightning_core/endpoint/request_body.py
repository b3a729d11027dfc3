"""Reads the prompt, the tools and the messages of a request body, in any wire format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

_SYSTEM = ("system", "instructions", "systemInstruction", "system_instruction")
_MESSAGES = ("messages", "input", "contents")
_SYSTEM_ROLES = ("system", "developer")


def instructions(body: Mapping[str, Any]) -> list[str]:
    """The texts of the system prompt, of all system messages and of the last message."""
    parts: list[Any] = [body.get(name) for name in (*_SYSTEM, "prompt")]
    for name in _MESSAGES:
        value = body.get(name)
        if isinstance(value, list) and value:
            items = cast("list[Any]", value)
            parts += [item for item in items if _is_system(item)]
            parts.append(items[-1])
        else:
            parts.append(value)
    return [text for part in parts for text in _texts(part)]


def system_prompt(body: Mapping[str, Any]) -> str:
    """The system prompt, with the system messages before the conversation; empty if there is none."""
    leading = list[Any]()
    for item in _items(body):
        if not _is_system(item):
            break
        leading.append(item)
    return "\n".join(filter(None, map(text_of_message, (*(body.get(name) for name in _SYSTEM), *leading))))


def conversation(body: Mapping[str, Any]) -> list[Any]:
    """The messages without system messages. A prompt that is a text is one message."""
    return [item for item in _items(body) if not _is_system(item)]


def tool_names(body: Mapping[str, Any]) -> frozenset[str]:
    """The names of the tools that the request offers; the type of a provider's own tool."""
    return frozenset(name for tool in _list(body.get("tools") or body.get("functions")) for name in _tool_names(tool))


def text_of_message(value: Any) -> str:
    """The text of a message or of its content; empty if it has none."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        value = next((fields[name] for name in ("text", "content", "parts") if fields.get(name)), "")
        return text_of_message(value)
    if isinstance(value, list):
        return "\n".join(filter(None, map(text_of_message, cast("list[Any]", value))))
    return value if isinstance(value, str) else ""


def _items(body: Mapping[str, Any]) -> list[Any]:
    value = next((body[name] for name in (*_MESSAGES, "prompt") if body.get(name)), None)
    return [value] if isinstance(value, str) else _list(value)


def _tool_names(tool: Any) -> Iterator[str]:
    if not isinstance(tool, Mapping):
        return
    fields = cast("Mapping[str, Any]", tool)
    declared = _list(fields.get("functionDeclarations") or fields.get("function_declarations"))
    if declared:
        for declaration in declared:
            yield from _tool_names(declaration)
        return
    function = fields.get("function")
    named = cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else fields
    # Gemini's own tools are keys: {"googleSearch": {}}.
    yield str(named.get("name") or named.get("type") or next(iter(named), ""))


def _is_system(item: Any) -> bool:
    return isinstance(item, Mapping) and cast("Mapping[str, Any]", item).get("role") in _SYSTEM_ROLES


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, Any]", value).values())
    return [text for item in cast("list[Any]", value) for text in _texts(item)] if isinstance(value, list) else []


_ARGUMENTS = re.compile(r"(\w+)\.(\d{1,9})\.(?:.*\.)?(?:arguments|input|args)(?:\.|$)")
"""The path of a field in the arguments of a tool call, in all wire formats."""


def refused_call(body: Any, path: str | None) -> Mapping[str, Any] | None:
    """The turn in ``body`` with the arguments of a tool call that ``path`` is in; None if it is elsewhere."""
    place = _ARGUMENTS.match(path or "")
    turns = body.get(place[1]) if place and isinstance(body, Mapping) else None
    turn = turns[int(place[2])] if place and isinstance(turns, list) and int(place[2]) < len(turns) else None
    return turn if isinstance(turn, Mapping) else None
