"""Converts Google's schemas, which differ from JSON schemas in the spelling of types and of null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COUNTS = ("maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties")
_SHOWN = frozenset({
    "title", "description", "format", "pattern", "enum", "default", "example", "minimum", "maximum", "required", *_COUNTS,
})  # fmt: skip


def json_schema(schema: Any) -> Any:
    """The JSON schema of Google's ``schema``. Values other than objects are returned unchanged."""
    if not isinstance(schema, Mapping):
        return schema
    converted: dict[str, Any] = {}
    for key, value in schema.items():
        match _camel(key), value:
            case "type", str(kind):
                converted["type"] = kind.lower()
            case "properties", Mapping():
                order = schema.get("propertyOrdering") or schema.get("property_ordering") or ()
                names = [*(name for name in order if name in value), *(name for name in value if name not in order)]
                converted["properties"] = {name: json_schema(value[name]) for name in names}
            case "items" | "additionalProperties" as name, inner:
                converted[name] = json_schema(inner)
            case "anyOf", list(options):
                converted["anyOf"] = [json_schema(option) for option in options]
            case "defs" | "$defs", Mapping():
                converted["$defs"] = {name: json_schema(inner) for name, inner in value.items()}
            case "ref" | "$ref", _:
                converted["$ref"] = value
            case name, str(count) if name in _COUNTS and count.isdecimal():  # JSON of a 64-bit integer
                converted[name] = int(count)
            case name, _ if name in _SHOWN:
                converted[name] = value
            case _:
                pass
    if schema.get("nullable") is True:
        return _nullable(converted)
    return converted


_TYPES = frozenset({"OBJECT", "ARRAY", "STRING", "INTEGER", "NUMBER", "BOOLEAN", "NULL"})


def lower_types(schema: Any) -> Any:
    """A JSON ``schema`` with Google's type names in lower case, which Google's API accepts there, too."""
    if isinstance(schema, list):
        return [lower_types(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value.lower() if key == "type" and isinstance(value, str) and value in _TYPES else lower_types(value)
        for key, value in schema.items()
    }


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "enum" in schema and None not in schema["enum"]:
        schema = {**schema, "enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]} if "type" in schema else schema


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest) if first else name


def camel_case(value: Any, entered: frozenset[str]) -> Any:
    """``value`` with field names in camel case, as Google's APIs accept both.

    Only the fields in ``entered`` are looked into: names inside arguments and schemas belong to the agent.
    """
    if isinstance(value, list):
        return [camel_case(item, entered) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: camel_case(inner, entered) if name in entered else inner
        for name, inner in ((_camel(key), inner) for key, inner in value.items())
    }
