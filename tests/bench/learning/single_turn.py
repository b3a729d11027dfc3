"""An agent that answers with one call, for the comparison with trainers of single responses."""

from __future__ import annotations

from functools import cache
from typing import Any

from openai import OpenAI

from lightning_core import trainable
from tests.bench.learning.expression import messages, reward


@cache
def _client() -> OpenAI:
    return OpenAI(api_key="any", max_retries=0)


@trainable("solver")
def solver(question: str) -> str:
    """The model's expression."""
    reply = _client().chat.completions.create(model="gpt", messages=messages(question), max_tokens=16)  # type: ignore[arg-type]
    return reply.choices[0].message.content or ""


def solve(task: dict[str, Any]) -> float:
    """1 if the expression has the right value, else 0."""
    return reward(solver(task["question"]), float(task["answer"]))
