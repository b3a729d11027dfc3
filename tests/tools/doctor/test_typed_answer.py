"""The script's answers to requests with a JSON schema."""

import json
from typing import Any

import pytest

from lightning_core.tools.doctor.typed_answer import typed_answer

TREE = {
    "type": "object",
    "properties": {"left": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]}},
    "required": ["left"],
}
PARTS = {"B": {"properties": {"b": {"oneOf": [{"type": "boolean"}]}}, "required": ["b"]}}
DOCUMENTS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "object", "properties": {"a": {"type": "null"}}}, {}),
    ({"enum": ["a", "b"]}, "a"),
    ({"const": 3}, 3),
    ({"type": ["integer", "null"], "minimum": 3}, 3),
    ({"type": "integer", "exclusiveMinimum": 3, "multipleOf": 5}, 5),
    ({"type": "integer", "maximum": -2}, -2),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
    ({"type": "number", "exclusiveMaximum": -1}, -2),
    ({"type": "string", "minLength": 5}, "okkkk"),
    ({"type": "string", "maxLength": 1}, "o"),
    ({"type": "string", "format": "date"}, "2000-01-01"),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [False, False]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [0, "ok"]),
    ({"$ref": "#/$defs/T", "$defs": {"T": TREE}}, {"left": None}),
    ({"allOf": [{"properties": {"a": {"type": "null"}}, "required": ["a"]}, {"$ref": "#/$defs/B"}], "$defs": PARTS},
     {"a": None, "b": False}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "document"), DOCUMENTS, ids=lambda v: json.dumps(v)[:60])
def test_an_answer_is_a_small_document_of_its_schema(schema: dict[str, Any], document: Any) -> None:
    assert json.loads(typed_answer(json.dumps(schema))) == document
