"""Schemas without references and combinations allow what the schemas allow."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from lightning_core.chat.tool_calls.schemas import alternatives

TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
VALUES: list[Any] = [
    *("", "ab", "abcd", "abcdef", 0, 3, 6, 7.5, 30, True, None, [], [1], ["a"], [1, "a"], ["a", 1], [1, 1, 1]),
    *({}, {"a": 1}, {"a": 7}, {"b": 1}, {"a": 1, "b": 1}, {"a": "t"}, {"b": "t"}, {"a": 1, "b": "t"}, {"x1": 1}),
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "lower bounds": {"type": "string", "minLength": 5, "anyOf": [{"minLength": 1}]},
    "upper bounds": {"type": "string", "maxLength": 2, "anyOf": [{"maxLength": 5}]},
    "bounds of numbers": {"type": "number", "minimum": 3, "maximum": 7, "allOf": [{"minimum": 1, "maximum": 30}]},
    "exclusive bounds": {"type": "number", "exclusiveMinimum": 3, "allOf": [{"exclusiveMinimum": 0}]},
    "bounds of arrays": {"type": "array", "minItems": 2, "allOf": [{"minItems": 0}]},
    "bounds of objects": {"type": "object", "maxProperties": 1, "allOf": [{"maxProperties": 3}]},
    "an option without values": {"maxLength": 2, "anyOf": [{"type": "string", "minLength": 5}, NUMBER]},
    "closed and open": {"additionalProperties": False, "allOf": [{"additionalProperties": True}], "type": "object"},
    "open and closed": {"additionalProperties": True, "allOf": [{"additionalProperties": False}], "type": "object"},
    "two kinds of more": {"type": "object", "additionalProperties": NUMBER, "allOf": [{"additionalProperties": {"maximum": 3}}]},
    "closed to the other's": {
        "type": "object",
        "properties": {"a": NUMBER},
        "additionalProperties": False,
        "allOf": [{"properties": {"b": NUMBER}}],
    },
    "the other's as more": {
        "type": "object",
        "properties": {"a": {}},
        "additionalProperties": TEXT,
        "allOf": [{"properties": {"b": {}}}],
    },
    "required but closed": {
        "type": ["object", "integer"],
        "additionalProperties": False,
        "anyOf": [{"type": "object", "properties": {"b": {}}, "required": ["b"]}, NUMBER],
    },
    "all required": {"type": "object", "required": ["a"], "allOf": [{"required": ["b"]}]},
    "a property of both": {"type": "object", "properties": {"a": NUMBER}, "allOf": [{"properties": {"a": {"maximum": 3}}}]},
    "patterns of names": {
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {"^x": {}},
        "allOf": [{"properties": {"x1": TEXT}}],
    },
    "closed to patterns": {"type": "object", "additionalProperties": False, "allOf": [{"patternProperties": {"^x": {}}}]},
    "items of both": {"type": "array", "items": NUMBER, "allOf": [{"items": {"minimum": 1}}]},
    "first items": {"type": "array", "prefixItems": [NUMBER], "allOf": [{"items": TEXT}, {"prefixItems": [{}, {}]}]},
    "unique items": {"type": "array", "uniqueItems": True, "allOf": [{"uniqueItems": False}]},
    "two patterns": {"type": "string", "pattern": "^a", "allOf": [{"pattern": "f$"}, {"pattern": "c"}]},
    "two factors": {"type": "integer", "multipleOf": 2, "allOf": [{"multipleOf": 3}, {"pattern": "a"}]},
    "an escaped reference": {"$ref": "#/$defs/A%20B~1C", "$defs": {"A B/C": NUMBER}},
    "a reference into a list": {"$ref": "#/$defs/A/anyOf/1", "$defs": {"A": {"anyOf": [TEXT, NUMBER]}}},
    "nothing": {"type": "object", "properties": {"a": {}}, "required": ["b"], "allOf": [{"additionalProperties": False}]},
}  # fmt: skip


def is_valid(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_alternatives_together_allow_what_the_schema_allows(name: str) -> None:
    schema = SCHEMAS[name]
    found = alternatives(schema, schema)
    definitions = {"$defs": schema.get("$defs", {})}
    wrong: list[Any] = []
    for value in VALUES:
        if any(is_valid(value, {**one, **definitions}) for one in found) != is_valid(value, schema):
            wrong.append(value)
    assert not wrong


def test_bounds_that_are_not_numbers_do_not_hide_those_that_are() -> None:
    for one, other in ((5, "oops"), (None, 5), (5, True)):
        schema = {"type": "string", "minLength": one, "allOf": [{"minLength": other}]}
        assert [alternative["minLength"] for alternative in alternatives(schema, schema)] == [5]


def test_a_reference_past_the_end_of_a_list_allows_anything() -> None:
    schema = {"$ref": "#/$defs/A/anyOf/2", "$defs": {"A": {"anyOf": [TEXT, NUMBER]}}}
    (alternative,) = alternatives(schema, schema)
    assert "type" not in alternative
