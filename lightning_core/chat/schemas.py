"""JSON schemas without references and combinations, for the parameters of tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "object", "array", "string")
"""Types from the most to the least specific: text is also a string."""
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_NESTED = 16
_MOST = 64
"""Alternatives of one schema; combinations with more have no effect."""
_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
"""Types of schemas without one, by a keyword."""

Schema = Mapping[str, Any]


def alternatives(schema: Any, root: Schema) -> list[Schema]:
    """Schemas that together allow what ``schema``, a part of ``root``, allows.

    Each has its types as a list, ``type``, or none if it allows all; finite choices are in its ``enum``.
    """
    return list(_alternatives(schema, root, ())) or [{}]


def kinds_of(alternative: Schema) -> Sequence[str]:
    """The types that one of `alternatives` allows."""
    return alternative.get("type", TYPES)


def type_of(value: Any) -> str:
    """The type of a JSON value."""
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


def _alternatives(schema: Any, root: Schema, path: tuple[str, ...]) -> list[Schema]:
    if not isinstance(schema, Mapping) or len(path) > _NESTED:
        return [] if schema is False else [{}]
    branches: list[Schema] = [_normal(schema)]
    for part, inner in _parts(schema, root, path):
        every = (option for subschema in part for option in _alternatives(subschema, root, inner))
        options = list(islice(every, _MOST + 1))
        if len(branches) * len(options) <= _MOST:
            pairs = ((branch, option) for branch in branches for option in options)
            branches = [both for pair in pairs if (both := _both(*pair)) is not None]
    return branches


def _parts(schema: Schema, root: Schema, path: tuple[str, ...]) -> Iterator[tuple[Sequence[Any], tuple[str, ...]]]:
    """Lists of schemas, of which one in each list holds, with the keywords and references that lead to them."""
    if isinstance(reference := schema.get("$ref"), str):
        yield ([] if reference in path else [_resolve(reference, root)]), (*path, reference)
    for subschema in schema.get("allOf") or ():
        yield [subschema], (*path, "allOf")
    for key in ("anyOf", "oneOf"):
        if options := schema.get(key):
            yield options, (*path, key)


def _normal(schema: Schema) -> Schema:
    """``schema`` without its combinations, its types as a list and its constant as a list of choices."""
    normal = {key: value for key, value in schema.items() if key not in (*_COMBINED, "type", "const", "nullable")}
    kind = schema.get("type")
    kinds = (
        [kind] if isinstance(kind, str) else [k for k in kind if isinstance(k, str)] if isinstance(kind, list) else []
    )
    if "const" in schema:
        normal["enum"] = [schema["const"]]
    if not isinstance(normal.get("enum", []), list):
        del normal["enum"]
    if not kinds:
        kinds = list(
            dict.fromkeys(implied for key, implied in _IMPLIED.items() if normal.get(key) not in (None, {}, []))
        )
    if kinds and schema.get("nullable") is True:
        kinds.append("null")
    return _with_types(normal, kinds) or normal


def _with_types(schema: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any] | None:
    """``schema`` with the types ``kinds``, if any, and only choices of them; None if none is left."""
    if "enum" in schema:
        kinds = kinds or TYPES
        fits = {*kinds, *(("integer",) if "number" in kinds else ())}
        schema = {**schema, "enum": [choice for choice in schema["enum"] if type_of(choice) in fits]}
        kinds = list({type_of(choice): None for choice in schema["enum"]})
        if not kinds:
            return None
    return {**schema, "type": kinds} if kinds else schema


def _both(one: Schema, other: Schema) -> Schema | None:
    """The schema of values that both allow; None if there are none."""
    both = {**one, **other}
    for key in ("properties", "patternProperties"):
        if key in one and key in other:
            shared = {name: {"allOf": [one[key][name], other[key][name]]} for name in one[key] if name in other[key]}
            both[key] = {**one[key], **other[key], **shared}
    if "required" in one and "required" in other:
        both["required"] = [*one["required"], *other["required"]]
    if "enum" in one and "enum" in other:
        both["enum"] = [choice for choice in one["enum"] if choice in other["enum"]]
    kinds = kinds_of(one if "type" in one else other)
    if "type" in one and "type" in other:
        wider = {*other["type"], *(("integer",) if "number" in other["type"] else ())}
        kinds = [kind for kind in one["type"] if kind in wider]
        if "number" in one["type"] and "integer" in other["type"] and "integer" not in kinds:
            kinds.append("integer")
        if not kinds:
            return None
    elif "type" not in both:
        kinds = []
    return _with_types(both, kinds)


def _resolve(reference: str, root: Schema) -> Any:
    """The part of ``root`` at a JSON pointer such as ``#/$defs/City``."""
    if reference == "#":
        return root
    target: Any = root
    for key in reference.removeprefix("#/").split("/"):
        target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target
