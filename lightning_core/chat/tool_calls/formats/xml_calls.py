"""Calls written as XML-like elements, one for each parameter: Qwen3-Coder and later, Nemotron 3, MiniMax M2, DeepSeek V3.2
and later, GLM 4.5 and later.

Values are not escaped. A value therefore ends at the first closing tag that the next parameter or the end of the call
follows, so it may contain closing tags itself.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_core.chat.tool_calls.formats.base import (
    CallBlock,
    Reading,
    ToolCall,
    ToolFormat,
    read_blocks,
    read_json,
    skip_space,
    write_json,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elements:
    """The tags of a call. The groups of ``parameter`` are its name, and whether it is text if the format says so."""

    head: re.Pattern[str]
    """Up to the first parameter; its group is the name of the tool."""
    parameter: re.Pattern[str]
    closing: str
    """The end of a parameter's value."""
    end: str
    """The end of the call."""
    typed: bool = False
    lines: bool = False
    """Whether a value is on separate lines."""


class _Text:
    """A text with the tags of its calls, each found once for all calls that may contain it."""

    def __init__(self, text: str, tags: _Elements) -> None:
        self.text = text
        self.tags = tags

    @cached_property
    def _closings(self) -> list[int]:
        return [match.start() for match in re.finditer(re.escape(self.tags.closing), self.text)]

    @cached_property
    def _parameters(self) -> list[int]:
        return [match.start() for match in self.tags.parameter.finditer(self.text)]

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        """The closing tags before a parameter or the end of a call, and the index after their white space."""
        ends: list[tuple[int, int]] = []
        for match in re.finditer(rf"{re.escape(self.tags.closing)}\s*+", self.text):
            after = match.end()
            if self.text.startswith(self.tags.end, after) or self.tags.parameter.match(self.text, after):
                ends.append((match.start(), after))
        return ends

    def value(self, at: int) -> tuple[str, int] | None:
        """The value that starts at ``at``, and the index after its closing tag and white space."""
        index = bisect_left(self._ends, (at, 0))
        if index == len(self._ends):
            return None
        end, after = self._ends[index]
        if _between(self._parameters, at, end) > _between(self._closings, at, end):
            return None  # a parameter without its closing tag
        value = self.text[at:end]
        return (value.removeprefix("\n").removesuffix("\n") if self.tags.lines else value), after


def _between(places: Sequence[int], start: int, end: int) -> int:
    return bisect_left(places, end) - bisect_left(places, start)


def _read_call(source: _Text, at: int) -> tuple[ToolCall | None, int]:
    """The call at ``at`` and its end; without a call, the index up to which it was read."""
    text, tags = source.text, source.tags
    head = tags.head.match(text, at)
    if head is None:
        return None, at
    arguments: dict[str, Any] = {}
    at = head.end()
    while (parameter := tags.parameter.match(text, at)) is not None:
        argument = source.value(parameter.end())
        if argument is None:
            return None, at
        value, at = argument
        if parameter[1] in arguments:
            return None, at
        arguments[parameter[1]] = value
        if tags.typed and parameter[2] != "true":
            read = read_json(value, 0)
            if read is None or read[1] != len(value.rstrip()):
                return None, at
            arguments[parameter[1]] = read[0]
    if not text.startswith(tags.end, at):
        return None, at
    return ToolCall(head[1], arguments, untyped=not tags.typed), at + len(tags.end)


def _read_block(source: _Text, at: int, *, opening: str, closing: str, several: bool | None) -> CallBlock:
    """A call, then ``closing``, which may be missing where the text or the block ends.

    ``several``: one or more calls, read up to a malformed one; None: the call ends with the block.
    """
    text = source.text
    calls: list[ToolCall] = []
    at = skip_space(text, at)
    call, reached = _read_call(source, at)
    while call is not None:
        calls.append(call)
        at = reached
        if several is None:
            return calls, at
        at = skip_space(text, at)
        call, reached = _read_call(source, at)
    if not calls:
        return [], reached
    if text.startswith(closing, at):
        return calls, at + len(closing)
    return (calls, at) if several or at == len(text) or text.startswith(opening, at) else ([], reached)


def _format(
    name: str,
    tags: _Elements,
    opening: str,
    closing: str,
    write: Callable[[Sequence[ToolCall]], str],
    *,
    marks: tuple[str, ...] = (),
    several: bool | None = False,
) -> ToolFormat:
    def read(text: str) -> Reading:
        source = _Text(text, tags)
        return read_blocks(
            text, opening, lambda _, at: _read_block(source, at, opening=opening, closing=closing, several=several)
        )

    return ToolFormat(
        name=name,
        opens=(opening,),
        marks=(opening, closing, *marks),
        read=read,
        write=write,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else write_json(value)


def _items(call: ToolCall) -> list[tuple[str, Any]]:
    return list(call.arguments.items()) if isinstance(call.arguments, Mapping) else []


def _write_functions(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in _items(call))
        + "</function>\n</tool_call>"
        for call in calls
    )


def _write_pairs(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        f"<tool_call>{call.name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in _items(call))
        + "</tool_call>"
        for call in calls
    )


def _invocations(
    name: str, block: str, *, prefix: str = "", typed: bool = False, marks: tuple[str, ...] = ()
) -> ToolFormat:
    """``<invoke name="…">`` with parameters by name, all calls in one block. ``prefix``: of every tag."""
    p = re.escape(prefix)
    tags = _Elements(
        head=re.compile(rf'<{p}invoke name="([^"<>]+)">\s*'),
        parameter=re.compile(rf'<{p}parameter name="([^"<>]*)"' + (' string="(true|false)"' if typed else "") + ">"),
        closing=f"</{prefix}parameter>",
        end=f"</{prefix}invoke>",
        typed=typed,
    )

    def parameter(key: str, value: Any) -> str:
        kind = f' string="{str(isinstance(value, str)).lower()}"' if typed else ""
        return f'<{prefix}parameter name="{key}"{kind}>{_text(value)}</{prefix}parameter>\n'

    def write(calls: Sequence[ToolCall]) -> str:
        written = "".join(
            f'<{prefix}invoke name="{call.name}">\n'
            + "".join(parameter(key, value) for key, value in _items(call))
            + f"</{prefix}invoke>\n"
            for call in calls
        )
        return f"<{prefix}{block}>\n{written}</{prefix}{block}>"

    return _format(name, tags, f"<{prefix}{block}>", f"</{prefix}{block}>", write, marks=marks, several=True)


FUNCTIONS = _format(
    "qwen_xml",
    _Elements(
        head=re.compile(r"<function=([^<>\s]+)>\s*"),
        parameter=re.compile(r"<parameter=([^<>]*)>"),
        closing="</parameter>",
        end="</function>",
        lines=True,
    ),
    "<tool_call>",
    "</tool_call>",
    _write_functions,
)
PAIRS = _format(
    "glm",
    _Elements(
        head=re.compile(r"([^<>{}\[\]\s]+)\s*(?=<arg_key>|</tool_call>)"),
        parameter=re.compile(r"<arg_key>([^<>]*+)</arg_key>\s*+<arg_value>"),
        closing="</arg_value>",
        end="</tool_call>",
    ),
    "<tool_call>",
    "</tool_call>",
    _write_pairs,
    marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    several=None,
)
MINIMAX = _invocations("minimax", "minimax:tool_call")
_DSML = "｜DSML｜"
DSML = tuple(
    _invocations(name, block, prefix=prefix, typed=True, marks=(_DSML,))
    for name, block, prefix in (
        ("dsml", "function_calls", _DSML),
        ("dsml_v4", "tool_calls", _DSML),
        ("dsml_v4_1", "calls", f"{_DSML} "),
    )
)
"""DeepSeek V3.2, V4 and V4.1."""
