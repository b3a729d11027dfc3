"""The text of a response that another model gave, as this model's template writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_core.errors import PolicyRequestError


def continuation(prompt: str, conversation: str, stops: Sequence[str], go_on: Callable[[], str]) -> str:
    """The text after ``prompt`` in ``conversation``, up to and with the text that ends a response.

    ``prompt``: rendered with the generation prompt. ``conversation``: the same messages and the response. ``go_on``: returns the
    conversation with one more message, for templates that end a response with the start of the next message, as GLM's. Raises
    `PolicyRequestError` if the response is not one piece of text after the prompt: no model could sample it.
    """
    if not conversation.startswith(prompt):
        raise PolicyRequestError("the chat template does not write the response as a continuation of its prompt")
    rest = conversation[len(prompt) :]
    end = _first(rest, stops)
    if end is None:
        longer = go_on()
        end = _first(longer[len(prompt) :], stops) if longer.startswith(conversation.rstrip()) else None
        if end is None:
            raise PolicyRequestError("the chat template does not end the response with a token that stops sampling")
        return longer[len(prompt) :][:end]
    more = rest[end:]
    for stop in stops:  # Phi's template ends the whole text once more
        more = more.replace(stop, "")
    if more.strip():
        raise PolicyRequestError("the chat template writes the response as several messages")
    return rest[:end]


def _first(text: str, stops: Sequence[str]) -> int | None:
    """The end of the first of ``stops`` in ``text``."""
    positions = [(at, -len(stop)) for stop in stops if (at := text.find(stop)) >= 0]
    if not positions:
        return None
    at, length = min(positions)
    return at - length
