"""JSON and spans without lone surrogates, which strings of Python can hold, but UTF-8 and so a file of traces cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pydantic_core import from_json, to_json

from lightning_core.chat.tool_calls.nesting import valid_unicode
from lightning_core.trace import SpanRecord


def write_json(value: Any) -> bytes:
    """``value`` as JSON, with U+FFFD for lone surrogates. Raises ValueError or TypeError for values that JSON does not have."""
    try:
        return to_json(value)
    except ValueError:
        return valid_unicode(json.dumps(value, ensure_ascii=False)).encode()


def read_json(data: bytes) -> Any:
    """The JSON in ``data``, with U+FFFD for lone surrogates. Raises ValueError for anything else."""
    try:
        return from_json(data)
    except ValueError:
        if b"\\ud" not in data.lower():
            raise
        return from_json(write_json(json.loads(data)))


def valid_span(span: SpanRecord) -> SpanRecord:
    """``span`` with U+FFFD for lone surrogates, such as those of file names that are not UTF-8."""
    if all(map(_is_valid, (span.name, span.error, *span.attributes.values()))):
        return span
    return replace(
        span,
        name=valid_unicode(span.name),
        error=None if span.error is None else valid_unicode(span.error),
        attributes={name: _valid(value) for name, value in span.attributes.items()},
    )


def _is_valid(value: Any) -> bool:
    if not isinstance(value, str):
        return not isinstance(value, (list, tuple, dict))
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return valid_unicode(value)
    return from_json(write_json(value)) if isinstance(value, (list, tuple, dict)) else value
