"""Values as SQLite and JSON can store them."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Any


def storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with lone surrogates in strings written as ``\\ud800``: SQLite stores UTF-8, which has none."""
    texts = {name: value for name, value in values.items() if isinstance(value, str) and not value.isascii()}
    return {**values, **{name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}}


def base64_of(value: object) -> str:
    """Bytes inside a list or an object, as OTLP/JSON writes them."""
    if isinstance(value, bytes):
        return b64encode(value).decode()
    raise TypeError(f"JSON cannot express an attribute of type {type(value).__name__}: {value!r:.200}")


def attributes_of(text: str) -> dict[str, Any]:
    """Attributes from JSON; lists become tuples, as OpenTelemetry has them."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(text).items()}
