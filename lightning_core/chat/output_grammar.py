"""The grammar of a response to a request with a JSON schema, in the Lark dialect of llguidance.

The schema holds for the answer. Before it, the response may have reasoning, and in its place tool calls, as the chat template writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_core.chat.arguments import types_of
from lightning_core.chat.call_ids import IdStyle
from lightning_core.chat.call_syntax import CallSyntax, ParameterSyntax
from lightning_core.chat.reasoning import Thought
from lightning_core.chat.template import ChatTemplate

COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""A single way to format a document: with free whitespace, small models generate whitespace without end."""

ARGUMENTS = "arguments"
"""The names of the rules for arguments of tools start with it."""
_JSON = "%json "
_GAP = "/\\n{0,2}/"
"""Between reasoning and the rest."""
_DEFINITIONS = ("$defs", "definitions")
_WITH_PROPERTIES = ("properties", "additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")
"""A function without any of these has no arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedCalls:
    """The tool calls that a response may have."""

    tools: Sequence[Mapping[str, Any]]
    """The functions that may be called, as chat completions define them."""
    required: bool
    """Whether the response must be calls."""
    one: bool
    """Whether it has at most one call."""


def output_grammar(
    template: ChatTemplate,
    tokens: Mapping[str, int],
    *,
    schema: Mapping[str, Any],
    calls: AllowedCalls | None,
    thought: Thought,
) -> str | None:
    """The grammar of a response whose answer satisfies ``schema``; None if the schema alone is the grammar.

    ``tokens``: the ids of the added tokens of the vocabulary. ``thought``: the reasoning in the prompt. Raises ValueError if
    the calls of the template are not regular.
    """
    around = template.reasoning
    if thought == "closed":
        around = None
    if calls is None and around is None:
        return None
    lark = _Lark(tokens, template.ids)
    bodies: list[str] = []
    if calls is None or not calls.required:
        bodies.append(lark.literal(template.tool_format.answer) + lark.answer(schema))
    if calls is not None:
        if template.call_syntax is None:
            raise ValueError(f"the form of its tool calls ({template.tool_format.name}) is not known well enough")
        bodies.append(_Calls(lark, template.call_syntax).write(calls))
    start = f"({' | '.join(bodies)})"
    if around is not None:
        opening, closing = around
        rest = f"{lark.text_without(closing)} {lark.literal(closing)}{_GAP}"
        start = f"{rest} {start}" if thought == "open" else f"({lark.literal(opening)}{rest})? {start}"
    lark.rules["start"] = start
    return "\n".join(f"{name}: {rule}" for name, rule in lark.rules.items())


def schemas(grammar: str) -> Iterator[tuple[str, str]]:
    """The JSON schemas in ``grammar``, with the names of their rules."""
    for rule in grammar.split("\n"):
        name, _, schema = rule.partition(f": {_JSON}")
        if schema:
            yield name, schema


class _Lark:
    """The rules of one grammar. Expressions end with a space, so they can be joined."""

    def __init__(self, tokens: Mapping[str, int], ids: IdStyle) -> None:
        self.rules: dict[str, str] = {}
        self._tokens = tokens
        self._ids = ids
        longest_first = sorted(tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if tokens else None

    def rule(self, kind: str, body: str) -> str:
        """A new rule, or an equal one. Names of terminals, which match text, are in capitals."""
        for name, known in self.rules.items():
            if known == body:
                return f"{name} "
        name = f"{kind}_{len(self.rules)}"
        self.rules[name] = body
        return f"{name} "

    def literal(self, text: str) -> str:
        """``text``; added tokens in it are matched by their ids, since special tokens have no text in the automaton."""
        pieces = [text] if self._special is None else self._special.split(text)
        return "".join(
            f"<[{self._tokens[piece]}]> " if piece in self._tokens else f"{json.dumps(piece, ensure_ascii=False)} "
            for piece in pieces
            if piece
        )

    def with_ids(self, text: str) -> str:
        """``text`` of a probed call, in which any id may be in the place of the probed one."""
        example, pattern = self._ids.patterns
        before, found, after = (*re.split(f"({example})", text, maxsplit=1), "", "")[:3]
        return self.literal(before) + (f"/{pattern}/ " if found else "") + self.literal(after)

    def answer(self, schema: Mapping[str, Any]) -> str:
        """A document of ``schema``."""
        return self.rule("answer", f"{_JSON}{json.dumps({**schema, 'x-guidance': COMPACT})}")

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """Arguments of ``schema``, or a value of them. Keywords that are not supported have no effect."""
        return self.rule(ARGUMENTS, f"{_JSON}{json.dumps({**schema, 'x-guidance': {**COMPACT, 'lenient': True}})}")

    def text_without(self, *texts: str) -> str:
        """Any text that contains none of ``texts``."""
        none = "|".join(map(_escaped, texts))
        return self.rule("TEXT", f"/(?s:.*)/ & ~/(?s:.*)({none})(?s:.*)/")


@dataclass(frozen=True, slots=True)
class _Calls:
    """Tool calls in ``syntax``."""

    lark: _Lark
    syntax: CallSyntax

    def write(self, calls: AllowedCalls) -> str:
        """The calls of one response."""
        syntax, lark = self.syntax, self.lark
        one = lark.rule("call", " | ".join(map(self._call, calls.tools)))
        more = "" if calls.one or syntax.between is None else f"({lark.literal(syntax.between)}{one})* "
        return f"{lark.literal(syntax.begin)}{one}{more}{lark.literal(syntax.finish)}"

    def _call(self, tool: Mapping[str, Any]) -> str:
        function, syntax, lark = tool["function"], self.syntax, self.lark
        schema = function.get("parameters") or {}
        name, end = lark.literal(function["name"]), lark.with_ids(syntax.end)
        if syntax.parameters is None:
            closed = {} if any(schema.get(key) for key in _WITH_PROPERTIES) else {"additionalProperties": False}
            arguments = lark.arguments({"type": "object", **schema, **closed})
            return f"{name}{lark.with_ids(syntax.head)}{arguments}{end}"
        parameters = _Parameters(lark, syntax.parameters, schema)
        ways = [f"{lark.with_ids(syntax.head)}{way}{end}" for way in parameters.ways()]
        if not parameters.required:
            ways.append(lark.with_ids(syntax.parameters.empty))
        return f"{name}({' | '.join(ways)}) "


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of a call, in the order of ``schema``, for formats whose arguments are not one JSON object."""

    lark: _Lark
    syntax: ParameterSyntax
    schema: Mapping[str, Any]
    required: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        required = set(self.schema.get("required") or ()) & set(self.schema.get("properties") or ())
        object.__setattr__(self, "required", frozenset(required))

    def ways(self) -> Iterator[str]:
        """The sequences of at least one parameter, by the first one."""
        properties: Mapping[str, Any] = self.schema.get("properties") or {}
        written = {key: self._parameter(key, schema) for key, schema in properties.items()}
        rest, rests = "", dict[str, str]()
        for key in reversed(list(properties)):
            rests[key] = rest
            more = f"{self.lark.literal(self.syntax.separator)}{written[key]}"
            rest = self.lark.rule("rest", f"{more if key in self.required else f'({more})? '}{rest}")
        for key in properties:
            yield f"{written[key]}{rests[key]}"
            if key in self.required:
                return

    def _parameter(self, key: str, schema: Any) -> str:
        lark, syntax = self.lark, self.syntax
        types = types_of(schema, self.schema)
        others = [kind for kind in types if kind != "string"]
        values: list[str] = []
        if len(others) < len(types) or not types:
            values.append(f"{lark.literal(syntax.before_text)}{self._text(schema)}{lark.literal(syntax.after_text)}")
        if others and not (values and syntax.before_text == syntax.before):
            values.append(f"{lark.literal(syntax.before)}{self._value(schema, others, has_text=bool(values))}")
        return lark.rule("parameter", f"{lark.literal(key)}({' | '.join(values)})")

    def _text(self, schema: Any) -> str:
        """A value that is text."""
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        texts = [choice for choice in choices or () if isinstance(choice, str)]
        if texts:
            return f"({'| '.join(map(self.lark.literal, map(self._quoted, texts)))}) "
        return self._any_text()

    @property
    def _quote(self) -> str:
        return self.syntax.after_text if self.syntax.after_text in ("'", '"') else ""

    def _quoted(self, text: str) -> str:
        return re.sub(rf"[{self._quote}\\]", r"\\\g<0>", text) if self._quote else text

    def _any_text(self) -> str:
        if self._quote:
            return self.lark.rule("TEXT", rf"/([^{self._quote}\\\x00-\x1f]|\\[{self._quote}\\nrt])*/")
        if self.syntax.after_text:
            return self.lark.text_without(self.syntax.after_text)
        # The parser finds the end of a value by these tags.
        tags = re.findall(r"<[^<]*", self.syntax.separator) or [self.syntax.separator]
        return self.lark.text_without(*map(str.strip, tags))

    def _value(self, schema: Any, types: Sequence[str], *, has_text: bool) -> str:
        """A value of ``types``, which are not text."""
        lark = self.lark
        if list(types) == ["boolean"]:
            words = ("True", "False") if self.syntax.true == "True" else ("true", "false")
            return f"({' | '.join(map(lark.literal, words))}) "
        if self.syntax.after_text and {"object", "array"} & {*types}:
            return self._nested(types)
        definitions = {key: self.schema[key] for key in _DEFINITIONS if key in self.schema}
        return lark.arguments({"type": list(types)} if has_text else {**schema, **definitions})

    def _nested(self, types: Sequence[str]) -> str:
        """A value in a format with its own quotes, some of ``types`` nested; their schemas are not guaranteed."""
        lark = self.lark
        quote = lark.literal(self.syntax.before_text.removeprefix(self.syntax.before))
        text = f"{quote}{self._any_text()}{lark.literal(self.syntax.after_text)}"
        scalar = lark.arguments({"type": ["number", "boolean", "null"]})
        lark.rules["item"] = f"{text}| {scalar}| array | object"
        lark.rules["array"] = '"[" (item ("," item)*)? "]"'
        lark.rules["object"] = '"{" (pair ("," pair)*)? "}"'
        lark.rules["pair"] = f'{text}":" item'
        flat = [kind for kind in types if kind not in ("array", "object")]
        nested = [kind for kind in types if kind not in flat]
        return f"({' | '.join([*nested, *([lark.arguments({'type': flat})] if flat else [])])}) "


def _escaped(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)
