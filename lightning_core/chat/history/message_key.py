"""What identifies a message: role, text and tool calls. Clients write the rest in different ways."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast


def message_key(message: Mapping[str, Any]) -> Any:
    """Role, text, tool calls with their ids, and the id of the call that the message answers."""
    calls = [(call.get("id"), call_key(call)) for call in message.get("tool_calls") or ()]
    return message.get("role"), plain_text(message), calls, message.get("tool_call_id")


def call_key(call: Mapping[str, Any]) -> tuple[str | None, str]:
    """The name of the tool and its arguments, as JSON with sorted names. The text of a free-form tool counts as its one argument."""
    custom = call.get("custom")
    if isinstance(custom, Mapping):
        given = cast("Mapping[str, Any]", custom)
        return given.get("name"), json.dumps({"input": given.get("input")})
    function = call.get("function") or {}
    arguments = function.get("arguments")
    with suppress(ValueError):  # a model may write anything
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return function.get("name"), json.dumps(arguments, sort_keys=True)


def plain_text(message: Mapping[str, Any]) -> str:
    """The text of a message; that of its text parts, if it has parts."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        parts = cast("Sequence[Any]", content)
        return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))  # pyright: ignore
    return str(content or "")


def other_parts(message: Mapping[str, Any]) -> list[Any]:
    """The parts of a message that are no text, such as images."""
    content = message.get("content")
    parts = cast("Sequence[Any]", content) if isinstance(content, (list, tuple)) else ()
    return [part for part in parts if not isinstance(part, Mapping) or part.get("type") not in _TEXTS]  # pyright: ignore


_TEXTS = ("text", "input_text", "output_text")
