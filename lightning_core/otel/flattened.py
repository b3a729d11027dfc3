"""Lists and objects that a convention has flattened into the keys of attributes, put together again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast


def collect(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What stands under ``prefix``, nested: ``{"p.0.role": "user"}`` with the prefix ``p.`` gives ``{"0": {"role": "user"}}``."""
    found: dict[str, Any] = {}
    for key, value in attributes.items():
        if key.startswith(prefix):
            *path, last = key.removeprefix(prefix).split(".")
            place = found
            for part in path:
                inner = place.get(part)
                if not isinstance(inner, dict):
                    inner = place[part] = dict[str, Any]()
                place = cast("dict[str, Any]", inner)
            place[last] = value
    return found


def flatten(attributes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The reverse, for exports that nest; a list of plain values stays one value."""
    for key, value in attributes.items():
        if isinstance(value, Mapping):
            yield from flatten(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in cast("list[Any]", value)):
            numbered = {str(i): item for i, item in enumerate(cast("list[Any]", value))}
            yield from flatten(numbered, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def listed(entries: Any) -> list[Any]:
    """The values of ``{"0": …, "1": …}`` in the order of their numbers."""
    if not isinstance(entries, Mapping):
        return []
    numbered = cast("Mapping[str, Any]", entries)
    return [numbered[key] for key in sorted((key for key in numbered if key.isdecimal()), key=int)]


def nested(entry: Any, key: str) -> Mapping[str, Any]:
    """The object under ``key``, or an empty one: what other programs write there is theirs to say."""
    value = cast("Mapping[str, Any]", entry).get(key) if isinstance(entry, Mapping) else None
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def tool_call(identity: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A tool call as chat completions write it."""
    function = {"name": str(name or ""), "arguments": as_text({} if arguments is None else arguments)}
    return {"id": "" if identity is None else str(identity), "type": "function", "function": function}


def as_text(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
