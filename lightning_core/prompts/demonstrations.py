"""Demonstrations: conversations that a model reads before the agent's own, as messages of chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lightning_core.chat.json_text import show_json
from lightning_core.errors import os_problem

Conversation = Sequence[Mapping[str, Any]]
"""Messages of a user, the assistant and tools. It starts with the user and ends with the assistant."""

_KEYS = {
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}


def read_demonstrations(path: Path) -> list[Any]:
    """The lines of a JSONL file, to be checked by `check_demonstrations`. Raises ValueError if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"but {str(path)!r} is not UTF-8 text; expected one JSON value per line") from None
    except OSError as error:
        raise ValueError(f"which cannot be read: {os_problem(error)}") from None
    found: list[Any] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"but {path}:{number} is not valid JSON: {error}") from None
    return found


def check_demonstrations(values: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """The conversations in ``values``, each a list of messages or an object with the key ``messages``.

    Arguments of tool calls become text. Raises ValueError for anything that is not a complete conversation.
    """
    return [_check_conversation(value, f"demonstration {number}") for number, value in enumerate(values, 1)]


def join_demonstrations(demonstrations: Iterable[Conversation]) -> list[dict[str, Any]]:
    """The messages of all ``demonstrations``, whose tool calls have ids that differ from each other and from an agent's."""
    joined: list[dict[str, Any]] = []
    count = 0
    for conversation in demonstrations:
        ids: dict[str, str] = {}
        for message in conversation:
            copied = dict(message)
            if "tool_calls" in message:
                copied["tool_calls"] = []
                for call in message["tool_calls"]:
                    # Nine letters and digits: some templates and providers accept no other ids.
                    ids[call["id"]] = f"demo{count:05d}"
                    copied["tool_calls"].append({**call, "id": ids[call["id"]]})
                    count += 1
            if "tool_call_id" in message:
                copied["tool_call_id"] = ids[message["tool_call_id"]]
            joined.append(copied)
    return joined


def _check_conversation(value: Any, where: str) -> list[dict[str, Any]]:
    messages = cast("Mapping[str, Any]", value).get("messages") if isinstance(value, Mapping) else value
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"{where} is {show_json(value)}; expected a list of messages, or an object with messages")
    checked: list[dict[str, Any]] = []
    made: set[str] = set()
    waiting: list[str] = []
    for number, message in enumerate(cast("Sequence[Any]", messages), 1):
        place = f"{where}, message {number}"
        found = _check_message(message, place)
        if found["role"] == "tool":
            if found["tool_call_id"] not in waiting:
                raise ValueError(f"{place} has tool_call_id {found['tool_call_id']!r}; expected one of {waiting!r}")
            waiting.remove(found["tool_call_id"])
        elif waiting:
            raise ValueError(f"{place} is of the {found['role']}, but the calls {waiting!r} have no results yet")
        ids = [call["id"] for call in found.get("tool_calls", ())]
        if made & {*ids} or len({*ids}) < len(ids):
            raise ValueError(f"{place} has tool calls with the ids {ids!r}; expected ids that differ in a conversation")
        made |= {*ids}
        waiting += ids
        checked.append(found)
    if checked[0]["role"] != "user" or checked[-1]["role"] != "assistant" or waiting:
        raise ValueError(
            f"{where} starts with {checked[0]['role']!r} and ends with {checked[-1]['role']!r}"
            f"{' and open tool calls' if waiting else ''}; expected 'user' first and an answer of the 'assistant' last"
        )
    return checked


def _check_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or cast("Any", message).get("role") not in _KEYS:
        raise ValueError(
            f"{place} is {show_json(message)}; expected an object with the role user, assistant or tool (a system prompt is set with "
            "extend or replace)"
        )
    fields = {key: value for key, value in cast("Mapping[str, Any]", message).items() if value is not None}
    role = str(fields["role"])
    if unknown := sorted(fields.keys() - _KEYS[role]):
        raise ValueError(f"{place} has {unknown[0]!r}; expected only {sorted(_KEYS[role])!r} in a message of {role!r}")
    content = fields.setdefault("content", "")
    if not isinstance(content, str):
        raise ValueError(f"{place} has the content {show_json(content)}; expected text")
    if role == "tool" and not isinstance(fields.get("tool_call_id"), str):
        raise ValueError(f"{place} has no tool_call_id; expected the id of the call that it answers")
    calls = fields.pop("tool_calls", None)
    if not calls:
        return fields
    if not isinstance(calls, Sequence):
        raise ValueError(f"{place} has the tool_calls {show_json(calls)}; expected a list")
    return {**fields, "tool_calls": [_check_call(call, place) for call in cast("Sequence[Any]", calls)]}


def _check_call(call: Any, place: str) -> dict[str, Any]:
    match call:
        case {"id": str(id), "function": {"name": str(name), "arguments": str() | dict() as arguments}}:
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return {"id": id, "type": "function", "function": {"name": name, "arguments": written}}
        case _:
            raise ValueError(
                f"{place} has the tool call {show_json(call)}; expected an id, and a function with its name and arguments"
            )
