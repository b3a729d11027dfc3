"""The grammar of a response to a request with a JSON schema, a required tool or at most one call, in the Lark dialect of llguidance.

A schema holds for the answer. Before it, the response may have reasoning, and in its place tool calls, as the chat template writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core.chat.templates.reasoning import Thought
from lightning_core.chat.templates.template import ChatTemplate
from lightning_core.chat.tool_calls.call_ids import IdStyle
from lightning_core.chat.tool_calls.call_syntax import CallSyntax, ParameterSyntax
from lightning_core.chat.tool_calls.formats.base import ToolFormat
from lightning_core.chat.tool_calls.schemas import Schema, alternatives, kinds_of
from lightning_core.errors import ConstraintError

COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""A single way to format a document: with free whitespace, small models generate whitespace without end."""

ARGUMENTS = "arguments"
"""The names of the rules for arguments of tools start with it."""
_JSON = "%json "
_LAZY = "until"
"""The names of the rules for text that ends as soon as it matches start with it."""
_GAP = "/\\n{0,2}/"
"""Between reasoning and the rest."""
_DEFINITIONS = ("$defs", "definitions")
_WITH_PROPERTIES = ("properties", "additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")
"""A function without any of these has no arguments."""


class ToolSchemaError(ConstraintError):
    """The arguments of a tool cannot be constrained to ``schema``, which has the JSON schema of its parameters."""

    def __init__(self, message: str, schema: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.schema = schema


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
    schema: Mapping[str, Any] | None,
    calls: AllowedCalls | None,
    thought: Thought,
) -> str | None:
    """The grammar of a response whose answer satisfies ``schema``, if any; None if the schema alone is the grammar.

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
    if schema is not None and (calls is None or not calls.required):
        bodies.append(lark.literal(template.tool_format.answer) + lark.answer(schema))
    if calls is not None:
        if template.call_syntax is None:
            raise ValueError(f"the form of its tool calls ({template.tool_format.name}) is not known well enough")
        written = _Calls(lark, template.call_syntax)
        bodies.append(written.write(calls))
        if schema is None and not calls.required:
            bodies += written.beside_text(calls, template.tool_format)
    start = f"({' | '.join(bodies)})"
    if around is not None:
        opening, closing = around
        rest = f"{lark.text_until(closing)}{_GAP}"
        start = f"{rest} {start}" if thought == "open" else f"({lark.literal(opening)}{rest})? {start}"
    lark.rules["start"] = start
    return "\n".join(f"{name}{'[lazy]' * name.startswith(_LAZY)}: {rule}" for name, rule in lark.rules.items())


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
        return "".join(
            f"<[{self._tokens[piece]}]> " if piece in self._tokens else f"{json.dumps(piece, ensure_ascii=False)} "
            for piece in self._pieces(text)
        )

    def _pieces(self, text: str) -> list[str]:
        pieces = [text] if self._special is None else self._special.split(text)
        return [piece for piece in pieces if piece]

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

    def free_text(self, never: Sequence[str]) -> str:
        """Any text without ``never``."""
        return self._text("/(?s:.*)/", *never)

    def text_until(self, closing: str, *never: str, length: str = "*") -> str:
        """Any text up to ``closing``, and it, without any of ``never``; ``length``: its repetition in a regular expression.

        A terminal takes as much text as it can, so the text must not take the start of ``closing``.
        """
        first, *rest = self._pieces(closing)
        if first in self._tokens:
            return f"{self._text(f'/(?s:.{length})/', closing, *never)}{self.literal(closing)}"
        if not rest:
            return self._text(f"/(?s:.{length})\\n?{_escaped(closing)}/", *never, kind=_LAZY)
        after = self.literal(closing.removeprefix(first))
        if length != "*":
            return f"{self._text(f'/[^{_escaped(first[0])}]{length}/')}{self.literal(first)}{after}"
        part = self._text(f"/(?s:.*){_escaped(first)}/", closing.removeprefix(first), *never, kind=_LAZY)
        return f"({part})+ {after}"

    def _text(self, pattern: str, *never: str, kind: str = "TEXT") -> str:
        none = "|".join(map(_escaped, never))
        return self.rule(kind, f"{pattern} & ~/(?s:.*)({none})(?s:.*)/" if never else pattern)


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

    def beside_text(self, calls: AllowedCalls, form: ToolFormat) -> list[str]:
        """Text without a call and, for formats without channels, text before the calls."""
        if form.bare:
            raise ValueError(f"its tool calls ({form.name}) begin like text")
        lark = self.lark
        text = f"{lark.literal(form.answer)}{lark.free_text(form.opens)}"
        if form.split is not None:
            return [text]
        begin = self.syntax.begin
        never = [mark for mark in form.opens if mark not in begin]
        # Text ends at the mark, not at all of `begin`: with the mark in it, only a call could follow, not the end.
        first = min((begin.index(mark) + len(mark) for mark in form.opens if mark in begin), default=len(begin))
        rest = f"{lark.literal(begin[first:])}{self.write(calls).removeprefix(lark.literal(begin))}"
        return [text, f"{lark.text_until(begin[:first], *never)}{rest}"]

    def _call(self, tool: Mapping[str, Any]) -> str:
        function, syntax, lark = tool["function"], self.syntax, self.lark
        schema = function.get("parameters") or {}
        name, end = lark.literal(function["name"]), lark.with_ids(syntax.end)
        if syntax.parameters is None:
            closed = {} if any(schema.get(key) for key in _WITH_PROPERTIES) else {"additionalProperties": False}
            arguments = lark.arguments({"type": "object", **schema, **closed})
            return f"{name}{lark.with_ids(syntax.head)}{arguments}{end}"
        ways: list[str] = []
        if not (found := alternatives(schema, schema)):
            raise ValueError(f"no arguments satisfy the parameters of the tool {function['name']!r}")
        for alternative in found:
            parameters = _Parameters(lark, syntax.parameters, alternative, schema)
            if parameters.any_names:
                raise ValueError(
                    f"the tool {function['name']!r} takes parameters of any name, which its form of calls cannot guarantee"
                )
            last = lark.with_ids(syntax.end.removeprefix(parameters.closing))
            ways += [f"{lark.with_ids(syntax.head)}{way}{last}" for way in parameters.ways()]
            if not parameters.required:
                ways.append(lark.with_ids(syntax.parameters.empty))
        return f"{name}({' | '.join(dict.fromkeys(ways))}) "


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of a call, in the order of ``schema``, for formats whose arguments are not one JSON object."""

    lark: _Lark
    syntax: ParameterSyntax
    schema: Schema
    """One of the alternatives of ``root``."""
    root: Schema

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the parameters, with those that are required but not declared."""
        declared: Mapping[str, Any] = self.schema.get("properties") or {}
        more = self.schema.get("additionalProperties", True)
        return (
            declared if more is False else {**declared, **{key: more for key in self.required if key not in declared}}
        )

    @property
    def required(self) -> Sequence[str]:
        return self.schema.get("required") or ()

    @property
    def any_names(self) -> bool:
        """Whether it only has parameters whose names are not known, which might be written twice."""
        return not self.properties and any(
            self.schema.get(key) for key in ("additionalProperties", "patternProperties")
        )

    @property
    def closing(self) -> str:
        """The tag after a value, which is a part of it here: text without quotes ends with it."""
        tag = None if self._quote else re.match(r"\s*<[^<>]*>", self.syntax.separator)
        return "" if tag is None else tag[0]

    def ways(self) -> Iterator[str]:
        """The sequences of at least one parameter, by the first one."""
        written = {key: self._parameter(key, schema) for key, schema in self.properties.items()}
        rest, rests = "", dict[str, str]()
        for key in reversed(written):
            rests[key] = rest
            more = f"{self.lark.literal(self.syntax.separator.removeprefix(self.closing))}{written[key]}"
            rest = self.lark.rule("rest", f"{more if key in self.required else f'({more})? '}{rest}")
        for key in written:
            yield f"{written[key]}{rests[key]}"
            if key in self.required:
                return

    def _parameter(self, key: str, schema: Any) -> str:
        lark = self.lark
        values: dict[str, list[str]] = {}
        for alternative in self._told_apart(alternatives(schema, self.root) or [{}]):
            for before, value in self._values(alternative):
                values.setdefault(before, []).append(value)
        ways = [f"{lark.literal(before)}({'| '.join(dict.fromkeys(some))}) " for before, some in values.items()]
        return lark.rule("parameter", f"{lark.literal(key)}({'| '.join(ways)})")

    def _told_apart(self, schemas: Sequence[Schema]) -> Sequence[Schema]:
        """``schemas``, or any text, if text looks like the other values and is not shorter than them."""
        texts = [schema for schema in schemas if "enum" not in schema and "string" in kinds_of(schema)]
        limited = all("minLength" in schema or "maxLength" in schema for schema in texts)
        nested = any({"object", "array"} & {*kinds_of(schema)} for schema in schemas)
        same = self.syntax.before_text == self.syntax.before
        return [{"type": ["string"]}] if same and texts and (nested or not limited) else schemas

    def _values(self, schema: Schema) -> Iterator[tuple[str, str]]:
        """The values of an alternative of a parameter, each with the text before it."""
        lark, syntax = self.lark, self.syntax
        before_text = syntax.before if self._quote else syntax.before_text
        definitions = {key: self.root[key] for key in _DEFINITIONS if key in self.root}
        choices = schema.get("enum")
        closing = lark.literal(self.closing)
        for choice in choices or ():
            before = before_text if isinstance(choice, str) else syntax.before
            yield before, f"{lark.literal(self._written(choice))}{closing}"
        for kind in () if choices is not None else kinds_of(schema):
            match kind:
                case "string":
                    yield before_text, self._text(schema)
                case "null" | "boolean":
                    for word in (None,) if kind == "null" else (True, False):
                        yield syntax.before, f"{lark.literal(self._written(word))}{closing}"
                case "object" | "array" if self._quote:
                    yield syntax.before, self._nested(kind)
                case _:
                    yield syntax.before, f"{lark.arguments({**schema, 'type': kind, **definitions})}{closing}"

    @property
    def _quote(self) -> str:
        """The text on both sides of a string; empty if strings have no quotes."""
        return self.syntax.after_text

    @property
    def _escapes(self) -> bool:
        return self._quote in ("'", '"')

    def _written(self, value: Any) -> str:
        """``value`` as the format writes it."""
        match value:
            case str() if self._escapes:
                escaped = re.sub(rf"[{self._quote}\\]", r"\\\g<0>", value)
                return f"{self._quote}{escaped}{self._quote}"
            case str():
                return f"{self._quote}{value}{self._quote}"
            case None | bool() if self.syntax.true == "True":
                return str(value)
            case list() if self._quote:
                return f"[{self.syntax.separator.join(map(self._written, value))}]"
            case dict() if self._quote:
                colon = ": " if self._escapes else ":"
                keys = map(self._written, value) if self._escapes else value
                pairs = (f"{key}{colon}{self._written(item)}" for key, item in zip(keys, value.values(), strict=True))
                return f"{{{self.syntax.separator.join(pairs)}}}"
            case _:
                return json.dumps(value, ensure_ascii=False)

    def _text(self, schema: Schema) -> str:
        """A value that is text."""
        if self._quote == '"':
            return self.lark.arguments({**schema, "type": "string"})
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        length = "*" if (least, most) == (0, "") else f"{{{least},{most}}}"
        if self._escapes:
            quote = self.lark.literal(self._quote)
            text = rf"/([^{self._quote}\\\x00-\x1f]|\\[{self._quote}\\nrt]){length}/"
            return f"{quote}{self.lark.rule('TEXT', text)}{quote}"
        if self._quote:
            return f"{self.lark.literal(self._quote)}{self.lark.text_until(self._quote, length=length)}"
        if not self.closing:
            raise ValueError("the form of its tool calls is not regular: nothing marks the end of text")
        # The parser finds the end of a value by these tags.
        never = [tag.strip() for tag in re.findall(r"<[^<]*", self.syntax.separator.removeprefix(self.closing))]
        return self.lark.text_until(self.closing.strip(), *never, length=length)

    def _nested(self, kind: str) -> str:
        """A nested value in a format with its own quotes; its schema is not guaranteed."""
        lark = self.lark
        text, scalar = self._text({}), lark.arguments({"type": ["number", "boolean", "null"]})
        if self._quote == "'":  # Python's strings may have either quotes
            text = f"({text}| {lark.arguments({'type': 'string'})}) "
        lark.rules["item"] = f"{text}| {scalar}| array | object"
        lark.rules["array"] = '"[" (item (/, ?/ item)*)? "]"'
        lark.rules["object"] = '"{" (pair (/, ?/ pair)*)? "}"'
        key = text if self._escapes else f"(/[A-Za-z_][A-Za-z0-9_]*/ | {text}) "
        lark.rules["pair"] = f"{key}/: ?/ item"
        return f"{kind} "


def _escaped(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)
