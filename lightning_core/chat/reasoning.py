"""What a model thinks before it answers, between ``<think>`` and ``</think>``."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, *, opened: bool, final: bool = True) -> tuple[str, str | None]:
    """Reasoning and answer of a response; the answer is None as long as the reasoning goes on.

    ``opened``: the prompt ended with the opening tag, as some templates write it themselves. Without ``final``, a text that may still
    become that tag counts as reasoning that has not ended.
    """
    start = text.lstrip()
    if not opened and not start.startswith(OPEN):
        undecided = not final and OPEN.startswith(start)
        return "", None if undecided else text
    inner = start.removeprefix(OPEN)
    if not final and OPEN.startswith(start):
        return "", None
    thought, closed, answer = inner.partition(CLOSE)
    return thought.strip(), answer.lstrip("\n") if closed else None


def opens_reasoning(prompt: str) -> bool:
    """Whether a response to the rendered ``prompt`` begins inside its reasoning."""
    return prompt.rstrip().endswith(OPEN)
