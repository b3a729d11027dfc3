"""Calls of the model with the OpenAI client."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from openai import OpenAI

Shots = Sequence[tuple[str, str]]
"""Examples: what the user says, and the response."""


@cache
def _client() -> OpenAI:
    return OpenAI(api_key="none", timeout=120)


def messages(system: str, shots: Shots, *last: str) -> list[dict[str, str]]:
    """A prompt: the examples, then ``last``, in which user and assistant alternate."""
    turns = [text for shot in shots for text in shot] + list(last)
    roles = ("user", "assistant")
    return [
        {"role": "system", "content": system},
        *({"role": roles[n % 2], "content": text} for n, text in enumerate(turns)),
    ]


def complete(prompt: Any, tokens: int | None = None) -> str:
    """The model's response to ``prompt``. ``tokens``: its maximum length; None: the run's."""
    limit: Any = {} if tokens is None else {"max_tokens": tokens}
    answer = _client().chat.completions.create(model="gpt-4o-mini", messages=prompt, **limit)
    return (answer.choices[0].message.content or "").strip()


def ask(system: str, shots: Shots, question: str, *, tokens: int | None = None) -> str:
    """The model's response to ``question`` after examples."""
    return complete(messages(system, shots, question), tokens)
