"""Calls with literals of a programming language: LFM2 and Llama 4 (Python), and Gemma 4."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from lightning_core.chat.tool_calls.formats.base import (
    CallBlock,
    Reading,
    ToolCall,
    ToolFormat,
    read_blocks,
    skip_space,
    write_json,
)

Found = tuple[Any, int] | None
"""A value and the index after it; None if it is malformed."""
_Read = Callable[[str, int], Found]

_DEPTH = 64
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_NAME = re.compile(r"[^\W\d][\w.-]*")


def _read_value(
    text: str, at: int, string: _Read, key: _Read, depth: int = 0, reach: Callable[[int], int] = int
) -> Found:
    """A literal. ``string`` and ``key`` read a string, and the key of an object up to its colon; ``reach`` gets each index."""
    reach(at)
    at = skip_space(text, at)
    if depth > _DEPTH or at >= len(text):
        return None

    def inner(text: str, at: int) -> Found:
        return _read_value(text, at, string, key, depth + 1, reach)

    if text[at] == "[":
        return _read_list(text, at + 1, inner, "]")
    if text[at] == "{":
        values = _read_list(text, at + 1, _pair(key, inner), "}")
        return None if values is None else (dict(values[0]), values[1])
    if (word := _WORD.match(text, at)) is not None:
        return (_WORDS[word[0]], word.end()) if word[0] in _WORDS else None
    if (number := _NUMBER.match(text, at)) is not None:
        return _number(number[0], number.end())
    return string(text, at)


def _number(written: str, end: int) -> Found:
    try:
        value = int(written)
    except ValueError:  # a fraction, or more digits than Python converts
        value = float(written)
    return (value, end) if math.isfinite(value) else None


def _pair(key: _Read, value: _Read) -> _Read:
    def read(text: str, at: int) -> Found:
        name = key(text, at)
        item = None if name is None else value(text, name[1])
        return None if name is None or item is None else ((name[0], item[0]), item[1])

    return read


def _read_list(text: str, at: int, item: _Read, closing: str) -> Found:
    """Items separated by commas, up to ``closing``."""
    items: list[Any] = []
    at = skip_space(text, at)
    while not text.startswith(closing, at):
        element = item(text, at)
        if element is None:
            return None
        items.append(element[0])
        at = skip_space(text, element[1])
        if text.startswith(",", at):
            at = skip_space(text, at + 1)
        elif not text.startswith(closing, at):
            return None
    return items, at + 1


# Python

_QUOTED = {q: re.compile(rf"{q}([^{q}\\]*(?:\\.[^{q}\\]*)*){q}", re.DOTALL) for q in "'\""}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n|.)", re.DOTALL)
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "\n": "",
}


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) == 1:
        return _ESCAPES.get(code, match[0])
    number = int(code[1:], 16)
    return chr(number) if number <= 0x10FFFF else match[0]


def _python_string(text: str, at: int) -> Found:
    match = _QUOTED[text[at]].match(text, at) if text[at] in _QUOTED else None
    if match is None:
        return None
    value = _ESCAPE.sub(_unescape, match[1])
    # Two escapes may be one character beyond the basic plane, as in JSON.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if "\\u" in match[
        1
    ] else value, match.end()


def _python_key(text: str, at: int) -> Found:
    string = _python_string(text, at) if at < len(text) else None
    colon = None if string is None else skip_space(text, string[1])
    if string is None or colon is None or not text.startswith(":", colon):
        return None
    return string[0], colon + 1


def _keyword(text: str, at: int) -> Found:
    name = _NAME.match(text, at)
    equals = None if name is None else skip_space(text, name.end())
    if name is None or equals is None or not text.startswith("=", equals):
        return None
    return name[0], equals + 1


_KEYWORD = _pair(_keyword, lambda t, i: _read_value(t, i, _python_string, _python_key))


def _python_call(text: str, at: int) -> Found:
    """``name(key=value, …)``."""
    name = _NAME.match(text, at)
    if name is None or not text.startswith("(", name.end()):
        return None
    call = _read_list(text, name.end() + 1, _KEYWORD, ")")
    return None if call is None else (ToolCall(name[0], dict(call[0])), call[1])


def _python_calls(text: str, at: int) -> Found:
    at = skip_space(text, at)
    calls = _read_list(text, at + 1, _python_call, "]") if text.startswith("[", at) else None
    return calls if calls is not None and calls[0] else None


def _python_value(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_python_value(str(k))}: {_python_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python_value, value))}]"
    return repr(value) if isinstance(value, (bool, int, float)) or value is None else write_json(value)


def _write_python(calls: Sequence[ToolCall]) -> str:
    def one(call: ToolCall) -> str:
        arguments = call.arguments.items() if isinstance(call.arguments, Mapping) else ()
        return f"{call.name}({', '.join(f'{key}={_python_value(value)}' for key, value in arguments)})"

    return f"[{', '.join(map(one, calls))}]"


_LFM, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"


def _read_lfm_block(text: str, at: int) -> CallBlock:
    calls = _python_calls(text, at)
    if calls is None:
        return None
    end = skip_space(text, calls[1])
    if text.startswith(_LFM_END, end):
        return calls[0], end + len(_LFM_END)
    return (calls[0], end) if end == len(text) else None


_PYTHON, _PYTHON_END = "<|python_start|>", "<|python_end|>"


def _read_pythonic(text: str) -> Reading:
    """A list of calls that is the whole answer, or that is between the marks."""
    before, mark, body = text.partition(_PYTHON)
    if not mark or before.lstrip().startswith("["):
        before, body = "", text
    calls = _python_calls(body, 0)
    if calls is None:
        return text, []
    end = skip_space(body, calls[1])
    if mark and body.startswith(_PYTHON_END, end):
        end = skip_space(body, end + len(_PYTHON_END))
    return (before, calls[0]) if end == len(body) else (text, [])


# Gemma 4

_GEMMA, _GEMMA_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_GEMMA_NAME = re.compile(r"\s*call:([^\s{}:]+)\s*(?=\{)")
_GEMMA_KEY = re.compile(r"([^:<]*+):")
_STRING_END = re.compile(rf"{re.escape(_QUOTE)}(?=\s*+[,}}\]])")


class _Gemma:
    """A text whose quotes are found once for all calls that may contain them."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.reached = 0
        """The index up to which values were read."""

    @cached_property
    def _ends(self) -> list[int]:
        return [match.start() for match in _STRING_END.finditer(self._text)]

    @cached_property
    def _key_ends(self) -> list[int]:
        return [match.start() for match in re.finditer(re.escape(f"{_QUOTE}:"), self._text)]

    def string(self, text: str, at: int) -> Found:
        """A string between quotes. It ends at the first quote that a comma or a bracket follows."""
        return self._quoted(at, self._ends, len(_QUOTE)) if text.startswith(_QUOTE, at) else None

    def key(self, text: str, at: int) -> Found:
        if text.startswith(_QUOTE, at):
            return self._quoted(at, self._key_ends, len(_QUOTE) + 1)
        match = _GEMMA_KEY.match(text, at)
        return None if match is None else (match[1], self._reach(match.end()))

    def value(self, text: str, at: int) -> Found:
        self._reach(at)
        return _read_value(text, at, self.string, self.key, reach=self._reach)

    def _quoted(self, at: int, ends: list[int], size: int) -> Found:
        start = at + len(_QUOTE)
        index = bisect_left(ends, start)
        if index == len(ends):
            return None
        return self._text[start : ends[index]], self._reach(ends[index] + size)

    def _reach(self, at: int) -> int:
        self.reached = max(self.reached, at)
        return at


def _read_gemma_block(text: str, at: int, source: _Gemma) -> CallBlock:
    name = _GEMMA_NAME.match(text, at)
    if name is None:
        return None
    source.reached = name.end()
    value = source.value(text, name.end())
    end = 0 if value is None else skip_space(text, value[1])
    if value is None or not text.startswith(_GEMMA_END, end):
        return [], source.reached
    return [ToolCall(name[1], value[0])], end + len(_GEMMA_END)


def _read_gemma(text: str) -> Reading:
    source = _Gemma(text)
    return read_blocks(text, _GEMMA, lambda t, at: _read_gemma_block(t, at, source))


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_value, value))}]"
    return write_json(value)


def _write_gemma(calls: Sequence[ToolCall]) -> str:
    return "".join(f"{_GEMMA}call:{call.name}{_gemma_value(call.arguments or {})}{_GEMMA_END}" for call in calls)


LFM = ToolFormat(
    name="lfm2",
    opens=(_LFM,),
    marks=(_LFM, _LFM_END),
    read=lambda text: read_blocks(text, _LFM, _read_lfm_block),
    write=lambda calls: f"{_LFM}{_write_python(calls)}{_LFM_END}",
)
PYTHONIC = ToolFormat(
    name="pythonic",
    opens=(_PYTHON,),
    marks=(_PYTHON, _PYTHON_END),
    read=_read_pythonic,
    write=_write_python,
    bare="[",
)
GEMMA = ToolFormat(
    name="gemma",
    opens=(_GEMMA,),
    marks=(_GEMMA, _GEMMA_END, _QUOTE),
    read=_read_gemma,
    write=_write_gemma,
)
