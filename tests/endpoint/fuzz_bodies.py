"""Random requests of each wire format, from the tables of its fields: a field that is added to a table is in them.

Everything is drawn from one ``Random``: hypothesis's, which shrinks, or one with a seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from lightning_core.dialects.dialect import Dialect
from lightning_core.dialects.fields import Fields

TEXTS = (
    "hi", "", "a", "writer", "<|im_end|>", "<tool_call>", "</think>", "\x00", "ünï", "\U0001f916" * 3, "{{ 1 }}", "%s{}", "a\r\nb",
    "\ud83e", "\u202e", "9" * 400, "x" * 3000, "-1", "null", "[]", "\ufffd",
)  # fmt: skip
ARGUMENTS = (
    '{"a": 1}', "{}", "", "null", "[1]", '"text"', '{"a": ', '{"a": "\\ud800"}', '{"a": NaN}', '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}",
    '{"a": 1, "a": 2}', "[" * 500 + "]" * 500, '{"a":' * 150 + "1" + "}" * 150, '{"\\u0000": "\\u0000"}', "{'a': 1}",
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    2,
    0.5,
    1e-300,
    1 << 31,
    1 << 63,
    -(1 << 63),
    10**400,
    1.0,
    128,
    129,
    float("nan"),
    float("inf"),
    True,
)
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True}}},
    {},
    True,
    {"type": ["string", "null"]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"anyOf": []},
    {"enum": []},
    {"type": "string", "pattern": "(["},
    {"type": "array", "minItems": 1 << 40},
)
VALUES: Mapping[str, tuple[Any, ...]] = {
    "model": ("base", "policy", "gpt-x", "writer", ""),
    "stream": (True, False, None),
    "temperature": (0, 1, 0.7, 2, 3), "top_p": (1, 0.5, 0), "topP": (1, 0.5, 0), "n": (1, 2, 3, 129), "candidateCount": (1, 2),
    "max_tokens": (1, 9, 64, 4096), "max_completion_tokens": (1, 9, 64), "max_output_tokens": (1, 16, 64), "maxOutputTokens": (1, 9, 64),
    "seed": (0, 7, -1), "logprobs": (True, False, 0, 1), "top_logprobs": (0, 1),
    "stop": ("x", ["a", "b"], "", [], [""], ["a"] * 50), "stop_sequences": (["x"], [""], []), "stopSequences": (["x"], []),
    "role": ("user", "assistant", "system", "developer", "tool", "model", "function"),
    "type": ("text", "input_text", "function", "custom", "tool_use", "tool_result", "image_url", "thinking"),
    "content": ("hi", "", None, [], [{"type": "text", "text": "hi"}], [{"type": "input_text", "text": "a"}, {"type": "text", "text": ""}]),
    "tool_choice": ("auto", "none", "required", {"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "f"}),
    "arguments": ARGUMENTS, "input": (*ARGUMENTS, {"a": 1}, "hi", []), "args": ({"a": 1}, {}, None, []),
    "name": ("f", "g", "a b", "", "f" * 99),
    "id": ("call_0", "call_1", "", {}, 7, None), "call_id": ("call_0", "call_1", ""), "tool_call_id": ("call_0", "call_1", "", None),
    "tool_use_id": ("call_0", "call_1", ""), "previous_response_id": ("resp_x", "", None),
    "parameters": SCHEMAS, "input_schema": SCHEMAS, "parametersJsonSchema": SCHEMAS, "responseSchema": SCHEMAS, "schema": SCHEMAS,
    "responseJsonSchema": SCHEMAS, "responseMimeType": ("application/json", "text/plain", "text/x.enum"),
    "mode": ("AUTO", "ANY", "NONE", "auto", "required"), "effort": ("low", "high", "none"), "reasoning_effort": ("low", "high", "minimal"),
    "include": (["reasoning.encrypted_content"], ["message.output_text.logprobs"], []),
    "chat_template_kwargs": ({"enable_thinking": False}, {}),
    "thinking": ({"type": "enabled", "budget_tokens": 9}, {"type": "disabled"}),
    "prompt": ("hi", [1, 2], ["a", "b"], [[1], [2]], [300], []),
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS[0]}}),
}  # fmt: skip
"""Values that are mostly valid, by the name of the field. Other fields get any value."""


HISTORY = frozenset({"messages", "contents", "input", "prompt"})
"""The fields of a request that hold its conversation, which `fuzz` writes."""
_DEEPEST = 12
"""Fields are added to objects that are at most this deep."""


def clone(value: Any) -> Any:
    """A copy; empty if it is too deep to be sent."""
    try:
        return json.loads(json.dumps(value))
    except RecursionError:
        return {}


def tables(dialect: Dialect) -> Mapping[str, list[tuple[str, Fields]]]:
    """The tables of the objects in a request, by their place in it, each with the role or type of the object."""
    found: dict[str, list[tuple[str, Fields]]] = {"": [("", dialect.FIELDS)]}
    for place, fields in dialect.NESTED.items():
        path, _, kind = place.partition(" (")
        found.setdefault(path, []).append((kind.rstrip(")"), fields))
    return found


class Bodies:
    """Draws parts of requests of ``dialect``."""

    def __init__(self, dialect: Dialect, random: Random) -> None:
        self._tables = tables(dialect)
        self.random = random

    def chance(self, one_in: int) -> bool:
        return self.random.randrange(one_in) == 0

    def text(self) -> str:
        return self.random.choice(TEXTS) if self.chance(3) else f"say {self.random.randrange(50)}"

    def any(self, depth: int = 0) -> Any:
        """Any JSON value."""
        kind = self.random.randrange(9 if depth < 3 else 6)
        if kind < 2:
            return self.random.choice((None, True, False))
        if kind < 4:
            return self.random.choice(NUMBERS)
        if kind < 6:
            return self.random.choice(TEXTS)
        size = self.random.randrange(3)
        if kind == 6:
            return [self.any(depth + 1) for _ in range(size)]
        if kind == 7:
            return {self.random.choice((*TEXTS, *VALUES)): self.any(depth + 1) for _ in range(size)}
        nested: Any = self.random.choice((1, "x", {}))
        for _ in range(self.random.choice((5, 150, 199, 250, 600))):
            nested = [nested] if size else {"a": nested}
        return nested

    def value(self, path: str) -> Any:
        """A value of the field at ``path``."""
        if self.chance(8):
            return self.any()
        if path in self._tables:
            return self.object(path)
        if f"{path}.N" in self._tables and not self.chance(4):
            return [self.object(f"{path}.N") for _ in range(self.random.randrange(3))]
        known = VALUES.get(path.rpartition(".")[2])
        return self.any() if known is None else clone(self.random.choice(known))

    def object(self, path: str) -> dict[str, Any]:
        """An object at ``path``, with most fields of its table that are supported, and some of the others."""
        kind, fields = self.random.choice(self._tables[path])
        made: dict[str, Any] = {}
        for name in sorted(fields.supported):
            if not self.chance(3):
                self._set(made, path, name)
        if kind and "type" in fields.supported:
            made["type"] = kind
        elif kind and "role" in fields.supported:
            made["role"] = kind
        self._add(made, path, fields, 3)
        return made

    def decorate(self, value: Any, path: str = "") -> None:
        """Add fields of the tables to the objects in ``value``, mostly a few."""
        if path.count(".") > _DEEPEST:
            return
        if isinstance(value, list):
            for inner in value:
                self.decorate(inner, f"{path}.N" if path else "N")
        elif isinstance(value, dict):
            for name, inner in list(value.items()):
                self.decorate(inner, f"{path}.{name}" if path else name)
            if path in self._tables:
                kinds = dict(self._tables[path])
                named = kinds.get(value.get("type", value.get("role"))) if _is_text(value) else None
                self._add(value, path, named or self.random.choice(list(kinds.values())), 2 if not path else 4)

    def _add(self, value: dict[str, Any], path: str, fields: Fields, one_in: int) -> None:
        """Add some fields of a table that ``value`` does not have."""
        while self.chance(one_in):
            name = self.random.choice(_names(fields))
            unsupported = {**fields.dropped, **fields.refused}.get(name)
            if unsupported is not None and unsupported.unless and self.chance(2):
                self._set(value, path, name, clone(self.random.choice(unsupported.unless)))
            elif unsupported is None or self.chance(3):
                self._set(value, path, name)

    def _set(self, value: dict[str, Any], path: str, name: str, *given: Any) -> None:
        outer, _, inner = name.partition(".")
        if inner and isinstance(value.setdefault(outer, {}), dict):
            self._set(value[outer], f"{path}.{outer}" if path else outer, inner, *given)
        elif not inner and (given or name not in HISTORY or path):
            value[name] = given[0] if given else self.value(f"{path}.{name}" if path else name)

    def spoil(self, body: Any) -> None:
        """Replace, remove, repeat or rename something in ``body``, often deep inside."""
        found = list(places(body))
        if not found:
            return
        outer, key = self.random.choice(found)
        how = self.random.randrange(6)
        if how == 0:
            del outer[key]
        elif how == 1 and isinstance(outer, list):
            outer.insert(key, clone(outer[key]))
        elif how == 1:
            outer[self.random.choice((f"{key}s", str(key).upper(), "", "\ud800", "x" * 300))] = outer.pop(key)
        elif how == 2 and isinstance(outer, list):
            other = self.random.randrange(len(outer))
            outer[key], outer[other] = outer[other], outer[key]
        elif how == 3 and isinstance(outer[key], str):
            outer[key] = self.random.choice((*TEXTS, *ARGUMENTS))
        elif how == 4:
            outer[key] = [outer[key]] if self.chance(2) else {"a": outer[key]}
        else:
            outer[key] = self.any()

    def encode(self, body: Any) -> bytes:
        """``body`` as JSON, rarely with wrong bytes."""
        try:
            data = json.dumps(body, ensure_ascii=self.chance(2)).encode(errors="surrogatepass")
        except RecursionError:
            data = b'{"model": ' + b"[" * 5000 + b"]" * 5000 + b"}"
        if self.chance(40):
            at = self.random.randrange(len(data) + 1)
            wrong = self.random.choice((b"", b"\xff", b"\x00", b"{", b'"', b"\\ud800", b"1e999", b" " * 5000))
            data = data[:at] + wrong + data[at + self.random.randrange(5) :]
        return data


_NAMES: dict[int, list[str]] = {}


def _names(fields: Fields) -> list[str]:
    """The names of all fields. Tables are constants of their modules."""
    if (names := _NAMES.get(id(fields))) is None:
        names = _NAMES[id(fields)] = sorted({*fields.supported, *fields.ignored, *fields.dropped, *fields.refused})
    return names


def _is_text(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("type", value.get("role")), str)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in ``value``: its list or object, and the index or key."""
    stack = [value]
    while stack:
        outer = stack.pop()
        if isinstance(outer, dict):
            yield from ((outer, key) for key in outer)
            stack += outer.values()
        elif isinstance(outer, list):
            yield from ((outer, index) for index in range(len(outer)))
            stack += outer
