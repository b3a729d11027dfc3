"""JSON values of clients as text for error messages: in the words of JSON, and short."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from lightning_core.errors import shorten

MOST_SHOWN = 200
"""Characters of a value in a message."""


def show_json(value: Any) -> str:
    """``value`` as JSON, with at most `MOST_SHOWN` characters. A string, and a list of nothing but strings, has single quotes."""
    if isinstance(value, str):
        return repr(shorten(value, MOST_SHOWN))
    if isinstance(value, list) and all(isinstance(item, str) for item in cast("list[Any]", value)):
        return shorten(repr(cast("list[str]", value)), MOST_SHOWN)
    text = shorten(json.dumps(value, ensure_ascii=False, default=repr), MOST_SHOWN)
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def kind_of(value: Any) -> str:
    """The type of ``value``, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case _:
            return "an object" if isinstance(value, Mapping) else "a list"
