"""Splits reasoning between ``<think>`` and ``</think>`` from the answer."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, *, opened: bool, final: bool = True) -> tuple[str, str | None]:
    """The reasoning and the answer of a response; the answer is None until the reasoning ends.

    ``opened``: the prompt ended with the opening tag, as with some templates. ``final``: the response is complete; otherwise a prefix
    of the opening tag counts as reasoning.
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
    """Whether the rendered ``prompt`` ends with the opening tag."""
    return prompt.rstrip().endswith(OPEN)
