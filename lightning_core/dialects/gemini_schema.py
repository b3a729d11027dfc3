"""Converts Google's schemas, which differ from JSON schemas in the spelling of types and of null."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.chat.json_text import show_json
from lightning_core.errors import PolicyRequestError

_COUNTS = ("maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties")
_SHOWN = frozenset({
    "title", "description", "format", "pattern", "enum", "default", "example", "minimum", "maximum", "required", *_COUNTS,
})  # fmt: skip


_GOOGLES_FORMATS = frozenset({"enum", "int32", "int64", "float", "double"})
"""Formats that say no more than the type and the choices, and that JSON schema does not have."""


def response_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a response to Google's ``schema``: its objects have the declared properties only, as Google's responses do."""
    return _closed(json_schema(schema))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: _closed(schema[key]) for key in ("items", "anyOf", "additionalProperties") if key in schema}
    named = {
        key: {name: _closed(value) for name, value in schema[key].items()}
        for key in ("properties", "$defs")
        if isinstance(schema.get(key), Mapping)
    }
    closed = {"additionalProperties": False} if "properties" in schema else {}
    kept = {key: value for key, value in schema.items() if key != "format" or value not in [*_GOOGLES_FORMATS]}
    return {**closed, **kept, **inner, **named}


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
                order = _order(schema.get("propertyOrdering") or schema.get("property_ordering") or ())
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
            case "enum", list(choices) if str(schema.get("type")).upper() in ("INTEGER", "NUMBER"):
                converted["enum"] = [_number(choice) for choice in choices]  # written as text
            case name, str(count) if name in _COUNTS and count.isdecimal():  # JSON of a 64-bit integer
                converted[name] = int(count)
            case name, _ if name in _SHOWN:
                converted[name] = value
            case _:
                pass
    if schema.get("nullable") is True:
        return _nullable(converted)
    return converted


def _order(names: Any) -> Sequence[str]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise PolicyRequestError(
            f"propertyOrdering of a schema is {show_json(names)}; expected a list of names", param="propertyOrdering"
        )
    return names


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


def _number(choice: Any) -> Any:
    try:
        return json.loads(choice) if isinstance(choice, str) else choice
    except ValueError:
        return choice


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest) if first else name


def camel_case(value: Any, entered: frozenset[str]) -> Any:
    """``value`` with field names in camel case, as Google's APIs accept both.

    Only the fields in ``entered`` are looked into: names inside arguments and schemas belong to the agent. Raises `PolicyRequestError`
    for a field in both spellings with different values.
    """
    if isinstance(value, list):
        return [camel_case(item, entered) for item in value]
    if not isinstance(value, Mapping):
        return value
    spelt: dict[str, str] = {}
    for key in value:
        if (other := spelt.setdefault(_camel(key), key)) != key and value[other] != value[key]:
            raise PolicyRequestError(
                f"{other} is {show_json(value[other])}, but {key} is {show_json(value[key])}; send one of them",
                param=key,
            )
    return {name: camel_case(value[key], entered) if name in entered else value[key] for name, key in spelt.items()}
