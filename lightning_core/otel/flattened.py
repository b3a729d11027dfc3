"""Lists and objects that are flattened into attribute keys, and their reconstruction."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast


def unflatten(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The attributes under ``prefix`` as nested dicts.

    ``{"p.0.role": "user"}`` with the prefix ``p.`` gives ``{"0": {"role": "user"}}``.
    """
    tree: dict[str, Any] = {}
    for key, value in attributes.items():
        if key.startswith(prefix):
            *path, last = key.removeprefix(prefix).split(".")
            place = tree
            for part in path:
                inner = place.get(part)
                if not isinstance(inner, dict):
                    inner = place[part] = dict[str, Any]()
                place = cast("dict[str, Any]", inner)
            place[last] = value
    return tree


def flatten(attributes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested attributes as dotted keys; a list of plain values stays one value."""
    for key, value in attributes.items():
        if isinstance(value, Mapping):
            yield from flatten(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in cast("list[Any]", value)):
            numbered = {str(i): item for i, item in enumerate(cast("list[Any]", value))}
            yield from flatten(numbered, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def numbered_values(entries: Any) -> list[Any]:
    """The values of ``{"0": …, "1": …}`` in numeric order; empty for anything else."""
    if not isinstance(entries, Mapping):
        return []
    numbered = cast("Mapping[str, Any]", entries)
    return [numbered[key] for key in sorted((key for key in numbered if key.isdecimal()), key=int)]


def nested_object(entry: Any, key: str) -> Mapping[str, Any]:
    """The object under ``key``; empty if there is none, or if it is not an object."""
    value = cast("Mapping[str, Any]", entry).get(key) if isinstance(entry, Mapping) else None
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def tool_call(identity: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A tool call in the form of chat completions."""
    function = {"name": str(name or ""), "arguments": as_text({} if arguments is None else arguments)}
    return {"id": "" if identity is None else str(identity), "type": "function", "function": function}


def as_text(value: Any) -> str:
    """A string unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
