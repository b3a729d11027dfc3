"""The texts that a search in a store looks through: those of messages, tool calls, tasks and refusals, without the keys of their JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from lightning_core import trace as tr

_JSON = (tr.INPUT_MESSAGES, tr.OUTPUT_MESSAGES, tr.SYSTEM_INSTRUCTIONS, tr.TASK, tr.ANSWER)
"""Attributes that are JSON."""
_TEXTS = (tr.TOOL, tr.TOOL_ARGUMENTS, tr.TOOL_RESULT, tr.REFUSED, tr.REASON)
_FORM = frozenset({"role", "type", "id", "call_id", "tool_call_id", "tool_use_id"})
"""Keys of messages whose values are not text."""


def attribute_texts(attributes: str) -> str:
    """The texts of the attributes of a span's row, one after the other."""
    found: Mapping[str, Any] = json.loads(attributes)
    return "\n".join([*message_texts(found[key] for key in _JSON if key in found), *_plain(found)])


def message_texts(documents: Iterable[Any]) -> Iterator[str]:
    """The texts of messages and other values as JSON. What is not JSON is a text."""
    for document in documents:
        try:
            yield from _texts(json.loads(document) if isinstance(document, str) else document)
        except (ValueError, RecursionError):
            yield str(document)


def _plain(attributes: Mapping[str, Any]) -> Iterator[str]:
    for value in (attributes.get(key) for key in _TEXTS):
        if value is not None:
            yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            if key not in _FORM:
                yield from _texts(item)
    elif value is not None and not isinstance(value, bool):
        yield str(value)
