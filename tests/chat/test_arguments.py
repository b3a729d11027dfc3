"""The types of arguments in formats that write all values as text."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_core.chat.tool_calls.arguments import parameters_of, typed
from lightning_core.chat.tool_calls.formats.base import ToolCall

ROOT: dict[str, Any] = {"$defs": {"City": {"type": "object", "properties": {}}, "Self": {"$ref": "#/$defs/Self"}}}


def convert(text: str, schema: Any) -> Any:
    parameters = {"type": "object", "properties": {"x": schema}, **ROOT}
    return typed(ToolCall("f", {"x": text}, untyped=True), parameters).arguments["x"]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        ("12", {"type": "integer"}, 12),
        ("12.0", {"type": "integer"}, 12),
        ("12.5", {"type": "integer"}, "12.5"),
        ("twelve", {"type": "integer"}, "twelve"),
        ("true", {"type": "integer"}, "true"),
        ("12", {"type": "number"}, 12),
        ("1e400", {"type": "number"}, "1e400"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ('{"a": 1}', {"$ref": "#/$defs/City"}, {"a": 1}),
        ('{"a": 1}', {"$ref": "#/$defs/Self"}, {"a": 1}),
        ('{"a": 1}', {"$ref": "#/$defs/None"}, {"a": 1}),
        ("{oops", {"type": "object"}, "{oops"),
        ("[1, 2]", {"items": {}}, [1, 2]),
        ("12", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, 12),
        ("a", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "a"),
        ("12", {"enum": ["12", "13"]}, "12"),
        ("12", {"enum": [12, 13]}, 12),
        ("12", {"const": "12"}, "12"),
        ("12", {}, 12),
        ("12", None, 12),
        ("12 apples", None, "12 apples"),
        (" [1] ", None, [1]),
        ("[" * 100_000, None, "[" * 100_000),
    ],
)
def test_a_value_gets_the_type_of_its_schema(text: str, schema: Any, value: Any):
    found = convert(text, schema)
    assert found == value
    assert type(found) is type(value)


def test_an_unknown_tool_or_parameter_is_read_as_json():
    call = ToolCall("f", {"x": "1", "y": "a"}, untyped=True)
    assert typed(call, None).arguments == {"x": 1, "y": "a"}
    assert typed(call, {"properties": "oops"}).arguments == {"x": 1, "y": "a"}
    assert parameters_of(["oops", {"function": {"name": "f"}}, {"name": "g", "parameters": {}}]) == {"g": {}}


def test_typed_arguments_are_kept():
    call = ToolCall("f", {"x": "1"})
    assert typed(call, {"properties": {"x": {"type": "integer"}}}) is call
