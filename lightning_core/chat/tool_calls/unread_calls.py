"""Tool calls that a response has as text: in the form of another model, or malformed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from lightning_core.chat.tool_calls.formats.base import calls_of, read_json
from lightning_core.chat.tool_calls.tool_formats import FORMATS

# Those of formats with a `frame` are around every message.
_OPENINGS = frozenset(opening for form in FORMATS if not form.frame for opening in form.opens)
_CALL_KEYS = ({"name", "arguments"}, {"name", "parameters"})
_MOST_OBJECTS = 8
"""Places in a text at which a JSON object is read."""


def has_unread_call(response: Mapping[str, Any], tools: Sequence[Any]) -> bool:
    """Whether the text of ``response``, an assistant message, has a call of ``tools``, and no call was read from it.

    It has the beginning of a call in one of the `FORMATS`, or a JSON object with arguments and the name of a tool, or is nothing but an
    object with a name and arguments. Models that know the form of another template, or that have learned calls without the tokens
    around them, write such text.
    """
    text = response.get("content")
    if response.get("tool_calls") or not isinstance(text, str):
        return False
    if any(opening in text for opening in _OPENINGS):
        return True
    names = {str(tool.get("function", tool).get("name")) for tool in tools if isinstance(tool, Mapping)}
    places = (at for at, character in enumerate(text) if character == "{")
    return any(_is_call(text, at, names) for at in islice(places, _MOST_OBJECTS))


def _is_call(text: str, at: int, names: Collection[str]) -> bool:
    """Whether the JSON object at index ``at`` is a call of a tool with one of ``names``, or the whole text and a call of any."""
    value = read_json(text, at)
    if value is None:
        return False
    found, end = value
    if isinstance(found, Mapping) and found.get("type") == "function" and "function" in found:
        found = found["function"]
    calls = calls_of(found, complete=True)
    is_whole = isinstance(found, Mapping) and set(found) in _CALL_KEYS and not (text[:at] + text[end:]).strip()
    return calls is not None and (is_whole or any(call.name in names for call in calls))
