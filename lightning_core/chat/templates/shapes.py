"""Proves that a chat template renders all texts of a conversation, once for each shape of conversation.

A shape is what a message has, with that before it and the kinds of later ones. A conversation with a new shape is rendered with marks
in place of its texts, each of which must be there once and in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from lightning_core.chat.messages import Message

_MARK = re.compile(r"probe_(?:text_\d{5}|argument_\d{5}_\d{3})")


def shapes(messages: Sequence[Message], *, tools: bool, generate: bool) -> frozenset[Hashable]:
    """The shapes of ``messages``: they decide what a template does with the text of each."""
    found: set[Hashable] = set()
    asked = answered = False
    after = None
    for m in reversed(messages):
        role, calls = m["role"], min(len(m.get("tool_calls") or ()), 2)
        name = bool(m.get("name")) and role in ("user", "system")
        kind = (role, calls, _has_text(m), name, bool(m.get("reasoning_content")))
        found.add((kind, after, asked, answered, tools, generate))
        asked = asked or role == "user"
        answered = answered or (role == "assistant" and not calls)
        after = kind
    found.add((None, after, messages[0]["role"], len(messages) > 1, tools, generate))
    return frozenset(found)


def find_loss(
    messages: Sequence[Message],
    arrange: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    render: Callable[[list[dict[str, Any]]], str],
) -> str | None:
    """What ``render`` leaves out, repeats or moves of conversations like ``messages``; None if it keeps all.

    ``arrange``: the order that the texts are expected in. Raises what ``render`` raises.
    """
    marked = [_with_marks(m, i) for i, m in enumerate(messages)]
    found = _MARK.findall(render([{**m} for m in marked]))
    expected = _marks_of(arrange([{**m} for m in marked]))
    for mark in expected:
        if found.count(mark) != 1:
            return f"{'repeats' if mark in found else 'leaves out'} {_place(messages, mark)}"
    # Some templates move the instructions to the last question.
    start = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    ordered = [[mark for mark in marks if "text" in mark and _index(mark) >= start] for marks in (found, expected)]
    moved = next((mark for mark, other in zip(*ordered, strict=True) if mark != other), None)
    return None if moved is None else f"moves {_place(messages, moved)}"


def _has_text(m: Message) -> bool:
    return bool(m["content"]) and not m["content"].isspace()


def _with_marks(m: Message, index: int) -> dict[str, Any]:
    marked = {k: v for k, v in m.items() if k != "reasoning_content"}
    if _has_text(m):
        marked["content"] = f"probe_text_{index:05d}"
    if calls := m.get("tool_calls"):
        marked["tool_calls"] = [
            {
                **call,
                "function": {**call["function"], "arguments": {"probe_key": f"probe_argument_{index:05d}_{n:03d}"}},
            }
            for n, call in enumerate(calls)
        ]
    return marked


def _marks_of(messages: Sequence[Message]) -> list[str]:
    marks: list[str] = []
    for m in messages:
        marks += _MARK.findall(m["content"])
        marks += [mark for call in m.get("tool_calls") or () for mark in _MARK.findall(str(call["function"]))]
    return marks


def _index(mark: str) -> int:
    return int(mark.split("_")[2])


def _place(messages: Sequence[Message], mark: str) -> str:
    i = _index(mark)
    what = "the arguments of a call" if "argument" in mark else "the text"
    before = f", after one of the role {messages[i - 1]['role']!r}" if i else ", the first one"
    calls = " with tool calls" if messages[i].get("tool_calls") else ""
    return f"{what} of message {i} (role {messages[i]['role']!r}{calls}{before})"
