"""Why llguidance cannot compile a JSON schema, and which part of the schema is the cause."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from lightning_core.chat.output_grammar import COMPACT
from lightning_core.errors import shorten

SUPPORTED = "https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md"
"""The keywords that llguidance supports."""

_NAMED = ("properties", "patternProperties")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_OPTIONS = "x-guidance"
"""Options of llguidance, in the schemas of a grammar."""
_SHARED = ("$defs", "definitions", _OPTIONS)
"""Keywords of the whole schema that are needed to compile a part."""
_MOST_COMPILED = 200
"""Parts of one schema that are compiled to find the cause."""
_MARK = re.compile(r"\n *\^+(?=\n)")
"""The line that points into a regular expression, above which it is quoted."""
_OPTION = re.compile(r"Enable '\w+' option to approximate (\w+) with (\w+)")


def explain_schema(root: Any) -> str | None:
    """The cause of the error in the JSON schema ``root``, with its path and what to do; None if it compiles."""
    why = _error(root, root)
    if not why:
        return None
    path, schema, left = "", root, _MOST_COMPILED
    while left > 0:
        for name, part in _parts(schema):
            left -= 1
            if left >= 0 and (inner := _error(part, root)):
                path, schema, why = f"{path}.{name}" if path else name, part, inner
                break
        else:
            break
    why = " ".join(_OPTION.sub(r"Use \2 in place of \1", _MARK.sub("", why)).split())
    where = f"in {shorten(path, 200)}, " if path else ""
    return f"{where}{shorten(why, 300)}. Rewrite this part of the schema or leave it out; {SUPPORTED} lists what is supported"


def _error(schema: Any, root: Any) -> str:
    """The error of llguidance for ``schema``, a part of ``root``; empty if there is none."""
    from llguidance import LLMatcher

    if isinstance(schema, Mapping) and isinstance(root, Mapping):
        shared = {key: root[key] for key in _SHARED if key in root}
        schema = {**shared, **cast("Mapping[str, Any]", schema)}
    overrides = None if isinstance(root, Mapping) and _OPTIONS in root else COMPACT
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
    except ValueError as error:  # a schema that is no object, or an integer of more than 64 bits
        return str(error)
    return LLMatcher.validate_grammar(grammar)


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly in ``schema``, with their paths."""
    if not isinstance(schema, Mapping):
        return
    schema = cast("Mapping[str, Any]", schema)
    for key in _NAMED:
        if isinstance(parts := schema.get(key), Mapping):
            yield from ((f"{key}.{name}", part) for name, part in cast("Mapping[str, Any]", parts).items())
    for key in _LISTED:
        if isinstance(parts := schema.get(key), list):
            yield from ((f"{key}.{i}", part) for i, part in enumerate(cast("list[Any]", parts)))
    for key in _SINGLE:
        if isinstance(part := schema.get(key), Mapping):
            yield key, part
