"""A small document of a JSON schema, with which the script answers agents that ask for typed output."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "time": "00:00:00Z",
    "uri": "https://example.com",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_DEPTH = 32


def typed_answer(schema: str) -> str:
    """A document of ``schema``, both as JSON. Patterns of text are not followed."""
    root = json.loads(schema)
    return json.dumps(_value(root, root, 0))


def _value(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return None
    schema = _resolved(schema, root, depth)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type") or ("object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            properties = schema.get("properties") or {}
            return {name: _value(properties.get(name), root, depth + 1) for name in schema.get("required") or ()}
        case "array":
            first = schema.get("prefixItems") or []
            items = [*first, *[schema.get("items")] * (schema.get("minItems", 0) - len(first))]
            return [_value(item, root, depth + 1) for item in items]
        case "integer" | "number" as number:
            return _number(schema, whole=number == "integer")
        case "boolean":
            return False
        case "null":
            return None
        case _:
            text = _FORMATS.get(str(schema.get("format")), "ok")
            return text.ljust(schema.get("minLength", 0), "k")[: schema.get("maxLength")]


def _resolved(schema: Mapping[str, Any], root: Any, depth: int) -> Mapping[str, Any]:
    """``schema`` with what it refers to, all of its ``allOf``, and the simplest of its alternatives."""
    if isinstance(reference := schema.get("$ref"), str):
        target = root
        for key in reference.removeprefix("#").split("/")[1:]:
            target = target.get(key.replace("~1", "/").replace("~0", "~"), {}) if isinstance(target, Mapping) else {}
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _resolved({**target, **rest}, root, depth + 1) if depth <= _DEPTH else rest
    ways = schema.get("anyOf") or schema.get("oneOf") or []
    # A recursive schema ends in an alternative that refers to nothing.
    simplest = min(ways, key=lambda way: "$ref" in json.dumps(way), default={})
    parts = [_resolved(part, root, depth + 1) for part in (*(schema.get("allOf") or ()), simplest) if depth <= _DEPTH]
    merged: dict[str, Any] = {}
    for part in (*parts, {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", "allOf")}):
        properties = {**merged.get("properties", {}), **part.get("properties", {})}
        required = [*merged.get("required", ()), *part.get("required", ())]
        merged |= {**part, **({"properties": properties, "required": required} if properties or required else {})}
    return merged


def _number(schema: Mapping[str, Any], *, whole: bool) -> float:
    """The allowed number that is next to 0."""
    step = schema.get("multipleOf") or (1 if whole else None)
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    if step is None:
        if above < 0 < below and low <= 0 <= high:
            return 0
        ends = [max(low, above), min(high, below)]
        inside = [end for end in ends if math.isfinite(end)]
        return sum(inside) / 2 if len(inside) == 2 else inside[0] + (1 if inside[0] == ends[0] else -1)
    least, most = max(low, math.nextafter(above, math.inf)), min(high, math.nextafter(below, -math.inf))
    number = math.ceil(least / step) if least > 0 else math.floor(most / step) if most < 0 else 0
    return number * step
