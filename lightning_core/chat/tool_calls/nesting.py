"""Limits what the arguments of a tool call may contain, so that everything that reads or writes them later can do so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

MOST_LEVELS = 100
"""Arguments may be this many levels deep. A request body may be 200, and holds the arguments of its history some levels down."""


def read_arguments(text: str) -> Any:
    """The JSON in ``text``, with U+FFFD for lone surrogates. Raises ValueError for anything else and for too many levels."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"expected JSON of at most {MOST_LEVELS} levels") from None
    if is_too_deep(value):
        raise ValueError(f"expected JSON of at most {MOST_LEVELS} levels")
    if "\\ud" in text or "\\uD" in text:
        value = json.loads(valid_unicode(json.dumps(value, ensure_ascii=False)))
    return value


def is_too_deep(value: Any) -> bool:
    """Whether ``value``, or the JSON in it if it is text, has more than `MOST_LEVELS` levels."""
    if isinstance(value, str):
        if value.count("[") + value.count("{") <= MOST_LEVELS:
            return False
        try:
            value = json.loads(value)
        except RecursionError:
            return True
        except ValueError:
            return False
    level: list[Any] = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [inner for item in level for inner in _items(item)]
        if not level:
            return False
    return True


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(cast("Mapping[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


def valid_unicode(text: str) -> str:
    """``text`` with U+FFFD for lone surrogates, which JSON can escape, but no response can contain as UTF-8."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
