"""Calls whose name and JSON arguments are separated by tokens: DeepSeek V3, R1 and V3.1, and Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_core.chat.tool_calls.formats.base import (
    CallBlock,
    Reading,
    ToolCall,
    ToolFormat,
    drop_frames,
    read_blocks,
    read_object,
    skip_space,
    write_json,
)

_DS_CALLS, _DS_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_CALL_END, _DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DS_FENCE = "```"
_DS_HEAD = re.compile(rf"([^<]*+){re.escape(_DS_SEP)}")
_DS_LINE = re.compile(rf"([^<`]*+){_DS_FENCE}json")


def _read_deepseek_block(text: str, at: int) -> CallBlock:
    """``function SEP name, fenced JSON`` (V3, R1), or ``name SEP JSON`` (V3.1)."""
    head = _DS_HEAD.match(text, at)
    if head is not None and head[1].strip() == "function":
        head = _DS_LINE.match(text, head.end())
    arguments = None if head is None else read_object(text, head.end())
    if head is None or arguments is None or not (name := head[1].strip()):
        return None
    end = skip_space(text, arguments[1])
    if text.startswith(_DS_FENCE, end):
        end = skip_space(text, end + len(_DS_FENCE))
    return ([ToolCall(name, arguments[0])], end + len(_DS_CALL_END)) if text.startswith(_DS_CALL_END, end) else None


def _read_deepseek(text: str) -> Reading:
    content, calls = read_blocks(text, _DS_CALL, _read_deepseek_block)
    return (drop_frames(content, _DS_CALLS, _DS_CALLS_END) if calls else content), calls


def _write_deepseek(calls: Sequence[ToolCall]) -> str:
    written = "\n".join(
        f"{_DS_CALL}function{_DS_SEP}{call.name}\n{_DS_FENCE}json\n{write_json(call.arguments)}\n{_DS_FENCE}{_DS_CALL_END}"
        for call in calls
    )
    return f"{_DS_CALLS}{written}{_DS_CALLS_END}"


_KIMI_CALLS, _KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_CALL_END, _KIMI_SEP = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_KIMI_HEAD = re.compile(rf"\s*((?:functions\.)?([\w.-]+):\d+)\s*{re.escape(_KIMI_SEP)}")


def _read_kimi_block(text: str, at: int) -> CallBlock:
    """``functions.NAME:INDEX SEP JSON``. Results are assigned to calls by this id."""
    head = _KIMI_HEAD.match(text, at)
    arguments = None if head is None else read_object(text, head.end())
    if head is None or arguments is None:
        return None
    end = skip_space(text, arguments[1])
    if not text.startswith(_KIMI_CALL_END, end):
        return None
    return [ToolCall(head[2], arguments[0], head[1])], end + len(_KIMI_CALL_END)


def _read_kimi(text: str) -> Reading:
    content, calls = read_blocks(text, _KIMI_CALL, _read_kimi_block)
    return (drop_frames(content, _KIMI_CALLS, _KIMI_CALLS_END) if calls else content), calls


def _write_kimi(calls: Sequence[ToolCall]) -> str:
    written = "".join(
        f"{_KIMI_CALL}{call.id or f'functions.{call.name}:{i}'}{_KIMI_SEP}{write_json(call.arguments)}{_KIMI_CALL_END}"
        for i, call in enumerate(calls)
    )
    return f"{_KIMI_CALLS}{written}{_KIMI_CALLS_END}"


DEEPSEEK = ToolFormat(
    name="deepseek",
    opens=(_DS_CALLS, _DS_CALL),
    marks=(_DS_CALLS, _DS_CALLS_END, _DS_CALL, _DS_CALL_END, _DS_SEP),
    read=_read_deepseek,
    write=_write_deepseek,
)
KIMI = ToolFormat(
    name="kimi",
    opens=(_KIMI_CALLS, _KIMI_CALL),
    marks=(_KIMI_CALLS, _KIMI_CALLS_END, _KIMI_CALL, _KIMI_CALL_END, _KIMI_SEP),
    read=_read_kimi,
    write=_write_kimi,
)
