"""Gives the arguments of a call the types of the tool's JSON schema, for formats that write all values as text.

A value that does not have the type of its schema stays text: the tool's own check reports it to the model. Without a schema, a
value that is JSON is read as JSON. vLLM's and SGLang's parsers follow the same schemas, but make a value of any type of ``null``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.chat.formats.base import ToolCall, read_json

_WORDS = {"true": True, "True": True, "false": False, "False": False}
_NULL = ("null", "None")
_ORDER = ("null", "boolean", "integer", "number", "object", "array", "string")
"""Types from the most to the least specific: text is also a string."""
_NESTED = 16


def parameters_of(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """The JSON schema of each tool's parameters, by the tool's name."""
    properties: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(schema := function.get("parameters"), Mapping):
            properties[str(function.get("name"))] = schema
    return properties


def typed(call: ToolCall, schema: Mapping[str, Any] | None) -> ToolCall:
    """``call`` with the types of ``schema``, the schema of its tool's parameters, if its arguments are text."""
    if not call.untyped or not isinstance(call.arguments, Mapping):
        return call
    root: Mapping[str, Any] = schema or {}
    properties = root.get("properties")
    known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    arguments = {key: _value(text, known.get(key), root) for key, text in call.arguments.items()}
    return call._replace(arguments=arguments, untyped=False)


def _value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    types = types_of(schema, root)
    if not types:
        return _json(text)
    for kind in types:
        read, value = _as(kind, text)
        if read:
            return value
    return text


def _json(text: str) -> Any:
    value = read_json(text, 0)
    return value[0] if value is not None and not text[value[1] :].strip() else text


def _as(kind: str, text: str) -> tuple[bool, Any]:
    """Whether ``text`` is of the type ``kind``, and its value."""
    word = text.strip()
    match kind:
        case "string":
            return True, text
        case "null":
            return word in _NULL, None
        case "boolean":
            return word in _WORDS, _WORDS.get(word)
        case _:
            value = _json(text)
            if kind == "integer" and isinstance(value, float) and value.is_integer():
                return True, int(value)
            expected = {"integer": int, "number": (int, float), "object": dict, "array": list}.get(kind)
            return expected is not None and isinstance(value, expected) and not isinstance(value, bool), value


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[str]:
    """The types that ``schema`` allows, the most specific first; empty if it does not restrict them."""
    if not isinstance(schema, Mapping) or depth > _NESTED:
        return []
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(_resolve(reference, root), root, depth + 1)
    kinds: set[str] = set()
    kind = schema.get("type")
    if isinstance(kind, str):
        kinds = {kind}
    elif isinstance(kind, list):
        kinds = {k for k in kind if isinstance(k, str)}
    elif "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        kinds = {_type_of(value) for value in values}
    else:
        for key in ("anyOf", "oneOf", "allOf"):
            for subschema in schema.get(key) or ():
                kinds |= set(types_of(subschema, root, depth + 1))
        if not kinds and "properties" in schema:
            kinds = {"object"}
        elif not kinds and "items" in schema:
            kinds = {"array"}
    if schema.get("nullable") is True:
        kinds |= {"null"}
    return [kind for kind in _ORDER if kind in kinds]


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case _:
            return "object" if isinstance(value, Mapping) else "array"


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of ``root`` at a JSON pointer such as ``#/$defs/City``."""
    target: Any = root
    for key in reference.removeprefix("#/").split("/"):
        target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target
