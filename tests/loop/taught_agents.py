"""Agents that learn from a teacher, and the teachers' prompts."""

from __future__ import annotations

from typing import Any

from tests import bandit

Messages = list[dict[str, Any]]


def with_examples(messages: Messages) -> Messages:
    return [{"role": "user", "content": "say 7"}, {"role": "assistant", "content": "abcd"}, *messages]


def unchanged(messages: Messages) -> Messages:
    return messages


def very_long(messages: Messages) -> Messages:
    return [{"role": "user", "content": "say " * 3000}, *messages]


def broken(messages: Messages) -> Messages:
    raise KeyError("examples")


def no_list(messages: Messages) -> Any:
    return messages[-1]["content"]


def equal(task: dict[str, Any]) -> float:
    """Its rewards say nothing."""
    bandit.solve(task)
    return 1.0
