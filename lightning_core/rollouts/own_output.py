"""Whether a request was refused because of what the model had sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_core.chat.history.turns import squeeze
from lightning_core.errors import ContextOverflowError
from lightning_core.trace import Call


def is_of_output(refusal: Call, calls: Sequence[Call]) -> bool:
    """Whether responses of trained agents in ``calls`` are why ``refusal`` was refused.

    If its prompt filled the context: they are most of the text from the first one on. Otherwise: the turn that the error names has the
    arguments of one of their tool calls, unchanged.
    """
    responses = [call.response for call in calls if call.trained and call.response is not None]
    if (refusal.error or "").startswith(ContextOverflowError.__name__):
        return _is_most(refusal.messages, responses)
    turn = _named(refusal)
    return turn is not None and _has_arguments(turn, responses)


def _named(refusal: Call) -> Mapping[str, Any] | None:
    """The turn with the arguments that the error names; the only message of a request that could not be read."""
    if len(refusal.messages) > 1:
        found = re.match(r"messages\.(\d{1,9})\.\S*arguments\b", refusal.refused or "")
        return next(iter(refusal.messages[int(found[1]) :]), None) if found else None
    return next(iter(refusal.messages), None)


def _is_most(messages: Sequence[Mapping[str, Any]], responses: Sequence[Mapping[str, Any]]) -> bool:
    """Whether ``responses`` are most of the text in ``messages`` from the first of them on.

    White space does not count: clients strip responses.
    """
    sampled = {_text(response) for response in responses}
    texts = [(_text(message), message.get("role") == "assistant") for message in messages]
    own = [is_answer and text in sampled for text, is_answer in texts]
    lengths = [len(text) for text, _ in texts]
    first = next((i for i, is_own in enumerate(own) if is_own), len(own))
    return 2 * sum(n for n, is_own in zip(lengths, own, strict=True) if is_own) > sum(lengths[first:])


def _text(message: Mapping[str, Any]) -> str:
    """What a message adds to a prompt, squeezed: its text and its calls, without reasoning, which the next prompt may leave out."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return squeeze(content + "".join(f"{name}{arguments}" for name, arguments in _calls(message)))


def _calls(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names and the arguments of the calls of ``message``."""
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield str(function.get("name")), str(function.get("arguments"))


def _has_arguments(turn: Mapping[str, Any], responses: Sequence[Mapping[str, Any]]) -> bool:
    written = {arguments for response in responses for _, arguments in _calls(response)}
    values = list(map(_read, written))
    return any(
        value in written if isinstance(value, str) else value in values for value in _values(turn) if value is not None
    )


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _values(value: Any) -> Iterator[Any]:
    """The texts and objects in ``value``."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, (str, Mapping)):
            yield value
        left += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
