"""The common parts of tool call formats: the call, the format, and reading JSON and blocks out of text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn


class ToolCall(NamedTuple):
    """A tool call in the text of a response."""

    name: str
    arguments: Any
    """An object, or a string if the model wrote one."""
    id: str | None = None
    untyped: bool = False
    """Whether the values of ``arguments`` are all text, because the format does not write types."""


Reading = tuple[str, list[ToolCall]]
"""The text around the calls, concatenated, and the calls in order."""

CallBlock = tuple[list[ToolCall], int] | None
"""The calls of one block and the index after it. Without calls it is malformed, and was read up to the index; None if it was
read in time linear in the text for all its openings together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One format of tool calls.

    `read` and `write` are pure, and `read` parses what `write` returns. No text makes `read` raise an error.
    """

    name: str
    opens: tuple[str, ...]
    """Texts at the start of a call. Streamed text is held back from there on."""
    marks: tuple[str, ...]
    """All texts around calls. Those that are special tokens are kept when decoding."""
    read: Callable[[str], Reading]
    write: Callable[[Sequence[ToolCall]], str]
    bare: str = ""
    """The first character of calls without a mark, which are the whole response."""
    split: Callable[[str, bool], tuple[str, str | None]] | None = None
    """For formats whose messages name their channel, the reasoning and the answer of a response, the answer None until
    it begins. The second argument is whether the response is complete."""
    frame: tuple[str, ...] = ()
    """Texts of `split` that are neither reasoning nor answer, the longest first."""
    answer: str = ""
    """The text before the answer, for formats with `split`."""
    thought: tuple[str, str] | None = None
    """The texts around reasoning, for formats with `split`."""
    one_call: bool = False
    """Whether a message of the assistant holds at most one call."""

    def is_json(self, text: str) -> bool:
        """Whether ``text`` begins as a JSON object or list, and not as a call in this format."""
        start = text.lstrip()
        return start.startswith(("{", "[")) and not start.startswith(self.opens)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for JSON's readers")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_SPACE = re.compile(r"\s*")
_TOKEN = re.compile(r'[ \t\n\r]*+(?:[\[{]|([\]}])|"[^"\\]*+(?:\\.[^"\\]*+)*+"|[-+.,:0-9Eaeflnrstu]++)', re.DOTALL)
_MOST_READ = 16
"""Malformed blocks are read up to this many times the length of the text, which bounds the work."""


def skip_space(text: str, at: int) -> int:
    """The first index at or after ``at`` that is not white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def read_json(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value at index ``at``, and its end; None if there is none."""
    at = skip_space(text, at)
    # Python's decoder counts the lines before an error, so it gets no more text than the value.
    try:
        value, end = _DECODER.raw_decode(text[at : _json_end(text, at)])
    except (ValueError, RecursionError):
        return None
    return value, at + end


def _json_end(text: str, at: int) -> int:
    """An index at or after the end of the JSON value at ``at``, and before anything that is not JSON."""
    depth = 0
    while (token := _TOKEN.match(text, at)) is not None:
        at = token.end()
        if token[1]:
            depth -= 1
        elif text[at - 1] in "[{":
            depth += 1
        if depth <= 0:
            break
    return at


def read_object(text: str, at: int) -> tuple[Mapping[str, Any], int] | None:
    """The JSON object at index ``at``, and its end; None if there is none."""
    value = read_json(text, at)
    return value if value is not None and isinstance(value[0], Mapping) else None


def write_json(value: Any) -> str:
    """``value`` as JSON, in the form of Hugging Face's ``tojson``."""
    return json.dumps(value, ensure_ascii=False)


def calls_of(value: Any, *, complete: bool = False) -> list[ToolCall] | None:
    """The calls in a JSON value; None if it is not a call. ``complete``: the arguments are required."""
    values = value if isinstance(value, list) else [value]
    calls: list[ToolCall] = []
    for item in values:
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
            return None
        key = next((k for k in ("arguments", "parameters") if k in item), None)
        arguments = {} if key is None or item[key] is None else item[key]
        if (complete and key is None) or not isinstance(arguments, (Mapping, str)):
            return None
        identifier = item.get("id")
        calls.append(ToolCall(item["name"], arguments, identifier if isinstance(identifier, str) else None))
    return calls or None


def write_call(call: ToolCall, key: str = "arguments") -> str:
    """``call`` as a JSON object."""
    return write_json({"name": call.name, key: call.arguments})


def read_blocks(text: str, opening: str, read_one: Callable[[str, int], CallBlock]) -> Reading:
    """Remove each block after ``opening`` that ``read_one`` parses; all else stays in the text.

    After too many malformed blocks that overlap, the rest is text.
    """
    content: list[str] = []
    calls: list[ToolCall] = []
    done = 0
    left = _MOST_READ * len(text)
    at = text.find(opening)
    while at >= 0:
        block = read_one(text, at + len(opening))
        if block is None or not block[0]:
            left -= 0 if block is None else block[1] - at
            at = text.find(opening, at + len(opening)) if left > 0 else -1
            continue
        content.append(text[done:at])
        calls += block[0]
        done = block[1]
        at = text.find(opening, done)
    return "".join([*content, text[done:]]), calls


def drop_frames(content: str, opening: str, closing: str) -> str:
    """``content`` without the tags around lists of calls that were removed, if nothing is left between them."""
    return re.sub(rf"{re.escape(opening)}\s*({re.escape(closing)}|$)", "", content)
