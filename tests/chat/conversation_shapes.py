"""Shapes of conversations, and random ones, whose texts can be found in a prompt."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A text."}}},
        },
    }
]


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def asked(text: str, *ids: str | None) -> dict[str, Any]:
    calls = [
        {**({} if i is None else {"id": i}), "type": "function", "function": {"name": "add", "arguments": {"a": f"argument{n}"}}}
        for n, i in enumerate(ids)
    ]  # fmt: skip
    return said("assistant", text, tool_calls=calls)


def result(identifier: str | None, text: str) -> dict[str, Any]:
    return said("tool", text, **({} if identifier is None else {"tool_call_id": identifier}))


SYSTEM, USER, ANSWER, MORE = said("system", "t00"), said("user", "t01"), said("assistant", "t02"), said("user", "t03")
LATE, C = said("system", "t04"), "abcdefghi"
CALL, RESULT = asked("", C), result(C, "t05")
SHAPES: dict[str, list[dict[str, Any]]] = {
    "plain": [SYSTEM, USER, ANSWER, MORE],
    "late system": [SYSTEM, USER, ANSWER, LATE, MORE],
    "last system": [USER, LATE],
    "two systems": [SYSTEM, LATE, USER],
    "system after result": [USER, CALL, RESULT, LATE],
    "two users": [USER, ANSWER, said("user", "t06"), MORE],
    "two answers": [USER, ANSWER, said("assistant", "t06"), MORE],
    "answer last": [USER, ANSWER],
    "answer first": [ANSWER, MORE],
    "answer after system": [SYSTEM, ANSWER, MORE],
    "only system": [SYSTEM],
    "empty user": [said("user", ""), ANSWER, MORE],
    "empty answer": [USER, said("assistant", ""), MORE],
    "name": [said("user", "t01", name="t00")],
    "loop": [SYSTEM, USER, CALL, RESULT],
    "text and call": [USER, asked("t02", C), RESULT],
    "text and call, answered": [USER, asked("t02", C), RESULT, said("assistant", "t06"), said("user", "t07")],
    "text and calls, twice": [USER, asked("t02", C), RESULT, asked("t06", "bcdefghij"), result("bcdefghij", "t07")],
    "user after result": [USER, CALL, RESULT, MORE],
    "no result": [USER, CALL, MORE],
    "call last": [USER, CALL],
    "result of nothing": [USER, ANSWER, result("bcdefghij", "t05")],
    "two results": [USER, asked("", C, "bcdefghij"), RESULT, result("bcdefghij", "t06")],
    "result again": [USER, CALL, RESULT, result(C, "t06")],
}


def texts_of(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [t for m in messages for t in re.findall(r"t\d\d", f"{m.get('name', '')} {m['content']}")]


def random_conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Up to nine messages in any order, with ids that repeat, are unknown or missing."""
    messages: list[dict[str, Any]] = []
    ids: Sequence[str | None] = [None]
    for n in range(rng.randint(1, 9)):
        role = rng.choice(
            ["user", "user", "assistant", "assistant", "calls", "calls", "tool", "tool", "tool", "system"]
        )
        text = f"t{n:02d}"
        if role == "calls":
            ids = rng.choice([["c0"], ["c0", "c1"], ["c0", "c0"], [None, None], ["functions.add:0"], [C, "c0", "c1"]])
            messages.append(asked(rng.choice(["", text]), *ids))
        elif role == "tool":
            messages.append(result(rng.choice([*ids, *ids, "other", None]), text))
        else:
            name = {"name": "bob"} if role == "user" and rng.random() < 0.2 else {}
            messages.append(said(role, "" if rng.random() < 0.1 else text, **name))
    return messages
