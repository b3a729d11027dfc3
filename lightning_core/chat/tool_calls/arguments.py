"""Gives the arguments of a call the types of the tool's JSON schema, for formats that write all values as text.

A value that does not have the type of its schema stays text: the tool's own check reports it to the model. Without a schema, a
value that is JSON is read as JSON. vLLM's and SGLang's parsers follow the same schemas, but make a value of any type of ``null``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_core.chat.tool_calls.formats.base import ToolCall, read_json
from lightning_core.chat.tool_calls.schemas import TYPES, alternatives, kinds_of

_WORDS = {"true": True, "True": True, "false": False, "False": False}
_NULL = ("null", "None")


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
    known = properties_of(root)
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


def types_of(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """The types that ``schema`` allows, the most specific first; empty if it does not restrict them."""
    found = alternatives(schema, root)
    kinds = {kind for one in found for kind in kinds_of(one)}
    return [] if any("type" not in one for one in found) else [kind for kind in TYPES if kind in kinds]


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of the properties in any of the alternatives of ``schema``."""
    found: dict[str, list[Any]] = {}
    for alternative in alternatives(schema, schema):
        properties = alternative.get("properties")
        for key, value in properties.items() if isinstance(properties, Mapping) else ():
            found.setdefault(key, []).append(value)
    return {key: {"anyOf": values} for key, values in found.items()}
