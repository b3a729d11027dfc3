"""Calls written as a JSON object with a name and arguments: Hermes and Qwen, Phi, Llama 3, and the older Mistral."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from lightning_core.chat.tool_calls.formats.base import (
    CallBlock,
    Reading,
    ToolCall,
    ToolFormat,
    calls_of,
    read_blocks,
    read_json,
    skip_space,
    write_call,
)


def _tagged_one(text: str, at: int, *, closing: str, opening: str) -> CallBlock:
    value = read_json(text, at)
    calls = None if value is None else calls_of(value[0])
    if value is None or calls is None:
        return None
    end = skip_space(text, value[1])
    if text.startswith(closing, end):
        return calls, end + len(closing)
    # A missing closing tag is accepted at the end of the text and before another call.
    return (calls, end) if end == len(text) or text.startswith(opening, end) else None


def tagged(name: str, opening: str, closing: str, *, as_list: bool = False) -> ToolFormat:
    """JSON between tags: one call in each pair, or with ``as_list`` all in one pair."""

    def write(calls: Sequence[ToolCall]) -> str:
        if as_list:
            return f"{opening}[{', '.join(map(write_call, calls))}]{closing}"
        return "\n".join(f"{opening}{write_call(call)}{closing}" for call in calls)

    read_one = partial(_tagged_one, closing=closing, opening=opening)
    return ToolFormat(
        name=name,
        opens=(opening,),
        marks=(opening, closing),
        read=lambda text: read_blocks(text, opening, read_one),
        write=write,
    )


_PYTHON_TAG = "<|python_tag|>"


def _read_llama(text: str) -> Reading:
    """JSON objects separated by semicolons, after the tag or as the whole answer."""
    before, tag, body = text.partition(_PYTHON_TAG)
    if not tag or before.lstrip().startswith("{"):
        before, body = "", text
    calls: list[ToolCall] = []
    at = skip_space(body, 0)
    while at < len(body):
        value = read_json(body, at) if body[at] == "{" else None
        read = None if value is None else calls_of(value[0], complete=True)
        if value is None or read is None:
            return text, []
        calls += read
        at = skip_space(body, value[1])
        if body.startswith(";", at):
            at = skip_space(body, at + 1)
    return (before, calls) if calls else (text, [])


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]([\w-]+))?(?:\[ARGS\])?\s*(?=\{)")


def _read_mistral_block(text: str, at: int) -> CallBlock:
    """A list of calls, or in later versions one name with its arguments."""
    named = _MISTRAL_NAME.match(text, at)
    arguments = read_json(text, at if named is None else named.end())
    if arguments is None:
        return None
    value, end = arguments
    if named is not None:
        return [ToolCall(named[1], value, named[2])], end
    calls = calls_of(value) if isinstance(value, list) else None
    return None if calls is None else (calls, end)


HERMES = tagged("hermes", "<tool_call>", "</tool_call>")
PHI = tagged("phi", "<|tool_call|>", "<|/tool_call|>", as_list=True)
MISTRAL = ToolFormat(
    name="mistral",
    opens=(_MISTRAL,),
    marks=(_MISTRAL, "[ARGS]", "[CALL_ID]"),
    read=lambda text: read_blocks(text, _MISTRAL, _read_mistral_block),
    write=lambda calls: f"{_MISTRAL}[{', '.join(map(write_call, calls))}]",
)
LLAMA = ToolFormat(
    name="llama",
    opens=(_PYTHON_TAG,),
    marks=(_PYTHON_TAG,),
    read=_read_llama,
    write=lambda calls: "; ".join(write_call(call, "parameters") for call in calls),
    bare="{",
)
