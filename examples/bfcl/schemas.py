"""The wheel's function docs as JSON schemas of tools."""

from __future__ import annotations

from functools import cache
from typing import Any

from examples.bfcl.wheel import entries, function_docs

_TYPES = {"dict": "object", "float": "number"}
_LEAD = "Tool description: "


def schemas(functions: tuple[str, ...]) -> list[dict[str, Any]]:
    """Name, description and parameters of each function.

    As in BFCL, without the schema of the result, and without the description of the class, which the wheel repeats in each
    function.
    """
    return [_docs()[name] for name in functions]


@cache
def _docs() -> dict[str, dict[str, Any]]:
    """The schemas of all functions by name; no two classes have a function of the same name."""
    classes = {name for entry in entries().values() for name in entry["involved_classes"]}
    return {
        name: {
            "name": name,
            "description": doc["description"].rpartition(_LEAD)[2],
            "parameters": _schema(doc["parameters"]),
        }
        for class_name in classes
        for name, doc in function_docs(class_name).items()
    }


def _schema(doc: dict[str, Any]) -> dict[str, Any]:
    """``doc`` with JSON Schema's names of types."""
    schema = dict(doc)
    schema["type"] = _TYPES.get(doc["type"], doc["type"])
    if "properties" in doc:
        schema["properties"] = {name: _schema(item) for name, item in doc["properties"].items()}
    if "items" in doc:
        schema["items"] = _schema(doc["items"])
    return schema
