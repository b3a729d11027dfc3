"""Definitions of tools in the form that a chat template reads: some join strings without a check."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Tools = Sequence[Mapping[str, Any]]


def find_forms(renders: Callable[[Tools], bool]) -> list[Callable[[Any], Any]]:
    """The changes of a definition that the template needs. ``renders``: whether it renders these tools."""
    parameters: dict[str, Any] = {"type": "object", "properties": {"probe_key": {"type": "string"}}}
    bare: dict[str, Any] = {"name": "probe_tool", "parameters": parameters}
    choice = {"type": "integer", "description": "x", "enum": [1], "default": 1}
    chosen = {**bare, "description": "x", "parameters": {**parameters, "properties": {"probe_key": choice}}}
    forms = [(bare, describe), (chosen, write_defaults)]
    return [form for function, form in forms if not renders([_tool(function)]) and renders([_tool(form(function))])]


def describe(function: dict[str, Any]) -> dict[str, Any]:
    """``function`` with a description, which may be empty."""
    return {**function, "description": function.get("description") or ""}


def write_defaults(schema: Any) -> Any:
    """``schema`` with the defaults of choices as text."""
    if isinstance(schema, list):
        return [write_defaults(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    written = {key: write_defaults(value) for key, value in schema.items()}
    if "default" in schema and not isinstance(schema["default"], str) and ("enum" in schema or "oneOf" in schema):
        written["default"] = json.dumps(schema["default"], ensure_ascii=False)
    return written


def in_forms(tools: Sequence[Any], forms: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """``tools`` with their definitions in ``forms``."""
    ready = list(tools)
    for form in forms:
        ready = [{**t, "function": form(t["function"])} if "function" in t else t for t in ready]
    return ready


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}
