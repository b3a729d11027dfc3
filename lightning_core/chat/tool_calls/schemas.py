"""JSON schemas without references and combinations, for the parameters of tools."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import unquote

TYPES = ("null", "boolean", "integer", "number", "object", "array", "string")
"""Types from the most to the least specific: text is also a string."""
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_NESTED = 16
_MOST = 64
"""Alternatives of one schema; combinations with more have no effect."""
_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
"""Types of schemas without one, by a keyword."""
_LOWER = ("minLength", "minimum", "exclusiveMinimum", "minItems", "minProperties")
_UPPER = ("maxLength", "maximum", "exclusiveMaximum", "maxItems", "maxProperties")
_RANGES = {
    ("minLength", "maxLength"): ("string",),
    ("minimum", "maximum"): ("integer", "number"),
    ("minItems", "maxItems"): ("array",),
    ("minProperties", "maxProperties"): ("object",),
}
"""The types of which no value is left if the first bound is above the second."""
_SEPARATE = ("pattern", "format", "multipleOf", "not", "contains", "propertyNames")
"""Keywords of which two cannot be one."""

Schema = Mapping[str, Any]


def alternatives(schema: Any, root: Schema) -> list[Schema]:
    """Schemas that together allow what ``schema``, a part of ``root``, allows.

    Each has its types as a list, ``type``, or none if it allows all; finite choices are in its ``enum``. Keywords of which two
    cannot be one, such as patterns, stay in its ``allOf``. There are no alternatives if ``schema`` allows nothing.
    """
    return _alternatives(schema, root, ())


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
    both = _merged(one, other)
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
    if empty := _empty_types(both):
        kinds = [kind for kind in kinds or TYPES if kind not in empty]
        if not kinds:
            return None
    return _with_types(both, kinds)


def _merged(one: Schema, other: Schema) -> dict[str, Any]:
    """The keywords of both, but for their types and choices."""
    both = {**one, **other}
    separate: dict[str, Any] = {}
    for key in one:
        if key not in other or one[key] == other[key]:
            continue
        if key in (*_LOWER, *_UPPER):
            numbers = [bound for bound in (one[key], other[key]) if type_of(bound) in ("integer", "number")]
            if numbers:
                both[key] = max(numbers) if key in _LOWER else min(numbers)
        elif key == "required":
            both[key] = list(dict.fromkeys([*_required(one), *_required(other)]))
        elif key == "uniqueItems":
            both[key] = True
        elif key in _SEPARATE:
            separate[key] = one[key]
    if all_of := [*one.get("allOf", ()), *other.get("allOf", ()), *([separate] if separate else ())]:
        both["allOf"] = all_of
    return both | _items(one, other) | _properties(one, other)


def _properties(one: Schema, other: Schema) -> dict[str, Any]:
    """The keywords on properties of both: each restricts the properties that only the other names as additional ones."""
    both: dict[str, Any] = {}
    pair = ((one, other), (other, one))
    if "additionalProperties" in one or "additionalProperties" in other:
        both["additionalProperties"] = _all(*(schema.get("additionalProperties", True) for schema, _ in pair))
    if "patternProperties" in one or "patternProperties" in other:
        patterns: dict[str, list[Any]] = {}
        for schema, second in pair:
            # With patterns in both, the names that one adds to the other's are not known; they stay.
            if second.get("additionalProperties") is not False or _mapping(second, "patternProperties"):
                for pattern, inner in _mapping(schema, "patternProperties").items():
                    patterns.setdefault(pattern, []).append(inner)
        both["patternProperties"] = {pattern: _all(*inner) for pattern, inner in patterns.items()}
    if "properties" in one or "properties" in other:
        names = dict.fromkeys([*_mapping(one, "properties"), *_mapping(other, "properties")])
        found = {name: _all(_property(one, name), _property(other, name)) for name in names}
        closed = both.get("additionalProperties") is False
        both["properties"] = {name: inner for name, inner in found.items() if not (closed and inner is False)}
    return both


def _property(schema: Schema, name: str) -> Any:
    """The schema of the property ``name``, declared or not."""
    declared = _mapping(schema, "properties")
    found = [declared[name]] if name in declared else []
    found += [inner for pattern, inner in _mapping(schema, "patternProperties").items() if _matches(pattern, name)]
    return _all(*found) if found else schema.get("additionalProperties", True)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # the patterns of JavaScript are others
        return True


def _items(one: Schema, other: Schema) -> dict[str, Any]:
    """The keywords on items of both."""
    both: dict[str, Any] = {}
    firsts = [first if isinstance(first := schema.get("prefixItems"), list) else [] for schema in (one, other)]
    rests = [schema.get("items", True) for schema in (one, other)]
    if any(isinstance(rest, list) for rest in rests):  # an older form of prefixItems
        return both
    if any(firsts):
        longest = max(map(len, firsts))
        padded = [[*first, *[rest] * (longest - len(first))] for first, rest in zip(firsts, rests, strict=True)]
        both["prefixItems"] = [_all(*pair) for pair in zip(*padded, strict=True)]
    if "items" in one or "items" in other:
        both["items"] = _all(*rests)
    return both


def _all(*schemas: Any) -> Any:
    """The schema of values that all ``schemas`` allow; those that are not schemas allow all."""
    if any(schema is False for schema in schemas):
        return False
    some: list[Any] = []
    for schema in schemas:
        if isinstance(schema, Mapping) and schema and schema not in some:
            some.append(schema)
    return {"allOf": some} if len(some) > 1 else some[0] if some else True


def _empty_types(schema: Schema) -> set[str]:
    """The types of which ``schema`` allows no value."""
    empty: set[str] = set()
    for keys, kinds in _RANGES.items():
        bounds = [schema[key] for key in keys if type_of(schema.get(key)) in ("integer", "number")]
        if len(bounds) == 2 and bounds[0] > bounds[1]:
            empty.update(kinds)
    if any(_property(schema, name) is False for name in _required(schema)):
        empty.add("object")
    return empty


def _required(schema: Schema) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _mapping(schema: Schema, key: str) -> Mapping[str, Any]:
    """The schemas in ``schema`` at ``key``, by name."""
    return value if isinstance(value := schema.get(key), Mapping) else {}


def _resolve(reference: str, root: Schema) -> Any:
    """The part of ``root`` at a JSON pointer such as ``#/$defs/City``."""
    if reference == "#":
        return root
    target: Any = root
    for part in unquote(reference.removeprefix("#/")).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(key)] if re.fullmatch("[0-9]+", key) and int(key) < len(target) else None
        else:
            target = target.get(key) if isinstance(target, Mapping) else None
    return target
