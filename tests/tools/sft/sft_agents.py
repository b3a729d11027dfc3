"""Agents with tools, whose rewards say little: for cross-entropy and supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from lightning_core import trainable

client = OpenAI(api_key="any", max_retries=0)
LISTING = "4 files: a.txt b.txt"
SECRET = "SHUT"
"""What `door` wants to hear: a random model does not say it."""


def _ask(messages: list[dict[str, Any]]) -> str:
    return client.chat.completions.create(model="gpt", messages=messages).choices[0].message.content or ""  # type: ignore[arg-type]


def called(number: int, result: str) -> list[dict[str, Any]]:
    """A tool call that the harness makes itself, because a random model makes none, and its result."""
    call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": result},
    ]


@trainable("clerk")
def look_twice(task: dict[str, Any]) -> float:
    """Two tool results and a message of the user, each after a response; nothing that it says earns anything."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    for more in (
        called(1, f" {LISTING}\n"),
        [*called(2, "<|im_end|> done"), {"role": "user", "content": "go on"}],
    ):
        messages += [{"role": "assistant", "content": _ask(messages)}, *more]
    _ask(messages)
    return 0.0


@trainable("clerk")
def forgetful(task: dict[str, Any]) -> float:
    """Its second prompt does not have what it said in the first."""
    _ask([{"role": "user", "content": task["prompt"]}])
    _ask(
        [{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": "I look."}, *called(1, LISTING)]
    )
    return 0.0


@trainable("clerk")
def door(task: dict[str, Any]) -> float:
    """Earns 1 if it says `SECRET` first, and again after a tool's result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    first = _ask(messages)
    second = _ask([*messages, {"role": "assistant", "content": first}, *called(1, "it is closed")])
    return float(first == second == SECRET)


def tasks(count: int = 8, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "prompt": f"say {i}"} for i in range(start, start + count)]
