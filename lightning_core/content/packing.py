"""JSON texts and messages as bytes."""

from __future__ import annotations

import json
import marshal
import zlib
from collections.abc import Sequence
from typing import Any, cast

_COMPRESSED_FROM = 1024
"""Texts of this many bytes and more are compressed."""
_PIECE = 1 << 15
"""Longer texts are written in pieces of this many characters: a fraction of a millisecond, between which other threads run."""
_DEEPEST = 4
"""Long texts are looked for in a message, in the parts of its content, and in the arguments of its calls."""


def write(value: Any, encoder: json.JSONEncoder) -> str:
    """JSON of ``value`` as ``encoder`` writes it, without holding the interpreter for as long as a long text takes."""
    return _write(value, encoder) if _has_long(value, _DEEPEST) else encoder.encode(value)


def _has_long(value: Any, depth: int) -> bool:
    if isinstance(value, str):
        return len(value) > _PIECE
    if depth and type(value) is dict:
        value = list(cast("dict[Any, Any]", value).values())
    return depth > 0 and type(value) is list and any(_has_long(item, depth - 1) for item in cast("list[Any]", value))


def _write(value: Any, encoder: json.JSONEncoder) -> str:
    if type(value) is str and len(value) > _PIECE:
        pieces = (value[start : start + _PIECE] for start in range(0, len(value), _PIECE))
        return f'"{"".join([encoder.encode(piece)[1:-1] for piece in pieces])}"'
    if type(value) is list:
        return f"[{encoder.item_separator.join([_write(item, encoder) for item in cast('list[Any]', value)])}]"
    if type(value) is dict and all(type(key) is str for key in cast("dict[Any, Any]", value)):
        items = cast("dict[str, Any]", value).items()
        fields = sorted(items, key=lambda item: item[0]) if encoder.sort_keys else items
        written = [f"{encoder.encode(key)}{encoder.key_separator}{_write(inner, encoder)}" for key, inner in fields]
        return f"{{{encoder.item_separator.join(written)}}}"
    return encoder.encode(value)


def marshalled(messages: Sequence[Any]) -> bytes:
    """``messages`` one after the other, each of which can be read without the next; a fifth of the time that JSON takes.

    Raises ValueError for objects that are not of JSON's types.
    """
    # Version 2: later ones refer to objects written before. The type and the length of the list are five bytes.
    return marshal.dumps(list(messages), 2)[5:]


def pack(data: bytes) -> bytes:
    """``data``, JSON, compressed if that makes it smaller. No JSON text starts as compressed data do."""
    if len(data) < _COMPRESSED_FROM:
        return data
    return min(data, zlib.compress(data, 6), key=len)


def unpack(data: bytes) -> bytes:
    """The JSON text that `SharedContent.texts` has as ``data``."""
    return zlib.decompress(data) if data.startswith(b"x") else data
