"""The text of a response that another model gave, as this model's template writes it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_core.errors import PolicyRequestError


def continuation(prompt: str, conversation: str, stops: Sequence[str]) -> str:
    """What follows ``prompt`` in ``conversation``, up to and with the text that ends a response.

    ``prompt``: rendered with the generation prompt. ``conversation``: the same messages and the response. Raises
    `PolicyRequestError` if the response is not one piece of text after the prompt: no model could sample it.
    """
    if not conversation.startswith(prompt):
        raise PolicyRequestError("the chat template does not write the response as a continuation of its prompt")
    rest = conversation[len(prompt) :]
    ends = [(at, len(stop)) for stop in stops for at in _all(rest, stop)]
    if not ends:
        raise PolicyRequestError("the chat template does not end the response with a token that stops sampling")
    if len(ends) > 1:
        raise PolicyRequestError("the chat template writes the response as several messages")
    at, length = ends[0]
    return rest[: at + length]


def _all(text: str, part: str) -> list[int]:
    found: list[int] = []
    at = text.find(part)
    while at >= 0:
        found.append(at)
        at = text.find(part, at + len(part))
    return found
