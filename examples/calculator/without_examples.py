"""The calculator's agent without the examples in its prompt, and its teacher's prompt, which has them (docs/distillation.md)."""

from __future__ import annotations

from typing import Any

from examples.calculator.agent import PROMPT, build, is_correct

SYSTEM, EXAMPLES = PROMPT[:1], [{"role": role, "content": text} for role, text in PROMPT[1:]]


def solve(task: dict[str, Any]) -> float:
    """Solve a task; return 1 if the last message is the correct number, else 0."""
    state = build().invoke({"messages": [*SYSTEM, ("user", task["question"])], "result": None})
    return is_correct(state, task)


def with_examples(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a call with the examples after the system message."""
    return [messages[0], *EXAMPLES, *messages[1:]]
