"""The literal texts of a template's tool calls, found by rendering calls and searching for their content.

A response with calls is ``begin``, the calls with ``between`` between them, and ``finish``. A call is its name, ``head``, its arguments and
``end``. Arguments are one JSON object, or have their own texts (`ParameterSyntax`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from lightning_core.chat.tool_calls.formats.base import read_json

Write = Callable[[Sequence[Mapping[str, Any]]], str]
"""Returns the text of a response with these calls, without the token that ends it."""

_NAME = "probe_name"
_ARGUMENTS = {"probe_a": "value_a", "probe_b": "value_b", "probe_c": 7071, "probe_d": 7072, "probe_e": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSyntax:
    """The texts around the parameters of a call, with ``separator`` between parameters."""

    before: str
    """Between the key and a value that is not text."""
    before_text: str
    """Between the key and a value that is text."""
    after_text: str
    """After a value that is text, before the separator; empty if text has no quotes."""
    separator: str
    true: str
    """The word for true."""
    empty: str
    """Follows the name of a call without arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The texts around tool calls."""

    begin: str
    head: str
    end: str
    between: str | None
    """None if a response has at most one call."""
    finish: str
    parameters: ParameterSyntax | None
    """None if the arguments are a JSON object."""


def find_syntax(write: Write, example_id: Callable[[str, int], str]) -> CallSyntax | None:
    """The syntax of the calls that ``write`` writes; None if it is not regular.

    ``example_id``: returns the id of the call with a name and an index.
    """

    def call(index: int, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        function = {"name": _NAME, "arguments": arguments}
        return {"id": example_id(_NAME, index), "type": "function", "function": function}

    one, two = write([call(0, _ARGUMENTS)]), write([call(0, _ARGUMENTS), call(1, _ARGUMENTS)])
    begin, named, rest = one.partition(_NAME)
    read = _find_arguments(rest)
    if not named or read is None:
        return None
    head, pieces, tail = read
    again = _find_arguments(two.partition(_NAME)[2]) if two.startswith(begin + _NAME) else None
    end, between = tail, None
    if again is not None and _NAME in again[2]:
        next_ = again[2].partition(_NAME)[0]
        common = takewhile(lambda pair: pair[0] == pair[1], zip(tail, next_, strict=False))
        end = _whole_tags("".join(character for character, _ in common))
        between = next_[len(end) :]
    finish = tail[len(end) :]
    if not pieces:
        return CallSyntax(begin=begin, head=head, end=end, between=between, finish=finish, parameters=None)
    empty = write([call(0, {})]).partition(_NAME)[2]
    parameters = _find_parameters(pieces, empty.removesuffix(finish))
    if parameters is None or not empty.endswith(finish):
        return None
    return CallSyntax(begin=begin, head=head, end=end, between=between, finish=finish, parameters=parameters)


def _find_arguments(text: str) -> tuple[str, list[str], str] | None:
    """The texts before, between and after the keys and values of the arguments in ``text``; no texts between for JSON."""
    at = text.rfind("{", 0, max(text.find("probe_a"), 0))
    value = read_json(text, at) if at >= 0 else None
    if value is not None and value[0] == _ARGUMENTS:
        return text[:at], [], text[value[1] :]
    pieces: list[str] = []
    parts = [part for key, value in _ARGUMENTS.items() for part in (key, str(value))]
    for part in parts:
        place = re.search(re.escape(part), text, re.IGNORECASE if part == "True" else 0)
        if place is None:
            return None
        pieces += [text[: place.start()], place[0]]
        text = text[place.end() :]
    return pieces[0], pieces[1:], text


def _find_parameters(pieces: Sequence[str], empty: str) -> ParameterSyntax | None:
    """``pieces``: the keys and values in order, with the texts between them."""
    before, after, true = pieces[1::4], pieces[3::4], pieces[-1]
    text_is_regular = before[0] == before[1] and after[0] == after[1] and after[0].endswith(after[2])
    if not text_is_regular or len({*before[2:]}) > 1 or after[2] != after[3]:
        return None
    return ParameterSyntax(
        before=before[2],
        before_text=before[0],
        after_text=after[0].removesuffix(after[2]),
        separator=after[2],
        true=true,
        empty=empty,
    )


def _whole_tags(text: str) -> str:
    """``text`` without the beginning of a tag at its end."""
    inside = [at for opening, closing in ("<>", "[]") if (at := text.rfind(opening)) > text.rfind(closing)]
    return text[: min(inside, default=len(text))]
