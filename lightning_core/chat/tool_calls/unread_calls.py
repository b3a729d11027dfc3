"""Tool calls that a response has as text: in the form of another model, or malformed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_core.chat.tool_calls.formats.base import calls_of, read_json
from lightning_core.chat.tool_calls.tool_formats import FORMATS

_OPENINGS = frozenset(opening for form in FORMATS for opening in form.opens)


def has_unread_call(response: Mapping[str, Any]) -> bool:
    """Whether the text of ``response``, an assistant message without tool calls, has one.

    It has the beginning of a call in one of the `FORMATS`, or a JSON object with a name and arguments. Models that know the form of
    another template, or have learned calls without the tokens around them, write such text.
    """
    text = response.get("content")
    if response.get("tool_calls") or not isinstance(text, str):
        return False
    if any(opening in text for opening in _OPENINGS):
        return True
    value = read_json(text, text.find("{")) if "{" in text else None
    return value is not None and calls_of(value[0], complete=True) is not None
