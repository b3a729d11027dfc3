"""OpenAI's harmony format (gpt-oss): a response is several messages, each with a channel and perhaps a recipient.

``<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{…}<|call|>`` is a call, the channel ``analysis``
is reasoning, and ``final`` and the rest of ``commentary`` are text. Source: OpenAI's cookbook, "OpenAI harmony response
format". The first message has no ``<|start|>assistant``, which ends the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_core.chat.tool_calls.formats.base import (
    Reading,
    ToolCall,
    ToolFormat,
    read_object,
    skip_space,
    write_json,
)

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_MARKS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
# Elsewhere, the model wrote about these tokens.
_STOP = re.compile(
    rf"(?:{'|'.join(map(re.escape, _ENDS))})(?=\s*+(?:{re.escape(_START)}|{re.escape(_CHANNEL)}|$))|(?={re.escape(_START)}assistant)"
)

# Possessive, so white space is read once.
_TO = r"(?:\s*+to=(?P<{}>[^\s<>]++))?"
_HEADER = re.compile(
    rf"\s*+(?:{re.escape(_START)}assistant)?{_TO.format('before')}\s*+"
    rf"(?:{re.escape(_CHANNEL)}\s*+(?P<channel>analysis|commentary|final)\b{_TO.format('after')})?"
    rf"\s*+(?:{re.escape(_CONSTRAIN)})?\s*+(?:json|code)?\s*+{re.escape(_MESSAGE)}"
)
_CALL_START = re.compile(rf"({re.escape(_START)}assistant\s*+)?(?:to=[^\s<>]*+|{re.escape(_CHANNEL)})")
_FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True)
class _Piece:
    """A message, or text that is not a well-formed one."""

    kind: str
    """``analysis``, ``commentary``, ``final``, ``call`` or ``other``."""
    text: str
    """The body of a message on a channel; else everything, with its tokens."""
    raw: str
    closed: bool


def _pieces(text: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    at = 0
    while at < len(text):
        header = _HEADER.match(text, at)
        recipient = None if header is None else header["before"] or header["after"]
        if header is None or (header["channel"] is None and recipient is None):
            # Up to the next message, which may follow without an end.
            end_match = _STOP.search(text, at + 1)
            end = len(text) if end_match is None else end_match.end()
            pieces.append(_Piece("other", text[at:end], text[at:end], end_match is not None))
        elif recipient is not None:
            call, end = _call(text, header.end(), recipient)
            if call is None:
                end_match = _STOP.search(text, header.end())
                end = len(text) if end_match is None else end_match.end()
            pieces.append(_Piece("other" if call is None else "call", text[at:end], text[at:end], end < len(text)))
        else:
            end_match = _STOP.search(text, header.end())
            body = text[header.end() : len(text) if end_match is None else end_match.start()]
            end = len(text) if end_match is None else end_match.end()
            pieces.append(_Piece(header["channel"], body, text[at:end], end_match is not None))
        at = end
    return pieces


def _call(text: str, at: int, recipient: str) -> tuple[ToolCall | None, int]:
    """The call to ``recipient`` whose arguments start at ``at``, and its end."""
    value = read_object(text, at) if recipient.startswith(_FUNCTIONS) else None
    name = recipient.removeprefix(_FUNCTIONS)
    if value is None or not name:
        return None, at
    end = skip_space(text, value[1])
    ended = next((end + len(mark) for mark in _ENDS if text.startswith(mark, end)), None)
    if ended is None and end < len(text) and not text.startswith(_START, end):
        return None, at
    return ToolCall(name, value[0]), end if ended is None else ended


def split(text: str, final: bool) -> tuple[str, str | None]:
    """The reasoning and the answer of a response; the answer is None until it begins.

    The answer keeps calls, and all that is malformed, with their tokens. ``final``: the response is complete; otherwise
    its last message may still change.
    """
    if not text.lstrip().startswith((_START, _CHANNEL, "to=")) and (final or not _may_begin(text.lstrip())):
        return "", text
    thoughts: list[str] = []
    answer: list[str] = []
    begun = False
    for piece in _pieces(text):
        open_ = not final and not piece.closed
        if piece.kind == "analysis" and not begun:
            thoughts += [] if open_ else [piece.text.strip()]
        elif piece.kind == "final" or (piece.kind == "commentary" and not open_):
            # More reasoning may follow a commentary.
            begun = begun or piece.kind == "final"
            answer.append(_settled(piece.text) if open_ else piece.text)
        elif not open_:
            begun = begun or piece.kind != "commentary"
            answer.append(piece.raw)
    thought = "\n".join(filter(None, thoughts))
    return thought, "".join(answer) if final or begun else None


def _may_begin(text: str) -> bool:
    return any(mark.startswith(text) for mark in (_START, _CHANNEL, "to="))


def _settled(body: str) -> str:
    """``body`` without the beginning of a token at its end."""
    for size in range(min(len(body), max(map(len, _MARKS))), 0, -1):
        if any(mark.startswith(body[-size:]) for mark in _MARKS):
            return body[:-size]
    return body


def _read(text: str) -> Reading:
    """Calls in the answer that `split` returns."""
    content: list[str] = []
    calls: list[ToolCall] = []
    done = at = 0
    while (start := _CALL_START.search(text, at)) is not None:
        header = _HEADER.match(text, start.start())
        recipient = None if header is None else header["before"] or header["after"]
        call, end = (None, 0) if header is None or recipient is None else _call(text, header.end(), recipient)
        if call is None:
            at = start.end()
            continue
        before = text[done : start.start()]
        content.append(before if start[1] else before.rstrip())
        calls.append(call)
        done = at = end
    return "".join([*content, text[done:]]), calls


def _write(calls: Sequence[ToolCall]) -> str:
    return f"{_CALL}{_START}assistant".join(
        f"{_CHANNEL}commentary to={_FUNCTIONS}{call.name} {_CONSTRAIN}json{_MESSAGE}{write_json(call.arguments)}"
        for call in calls
    )


HARMONY = ToolFormat(
    name="harmony",
    opens=(_CHANNEL, _START, *_ENDS, "to=functions."),
    marks=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END),
    read=_read,
    write=_write,
    split=split,
    frame=(
        f"{_START}assistant{_CHANNEL}final{_MESSAGE}",
        f"{_START}assistant{_CHANNEL}analysis{_MESSAGE}",
        f"{_CHANNEL}final{_MESSAGE}",
        f"{_CHANNEL}analysis{_MESSAGE}",
        f"{_START}assistant",
        _END,
    ),
    answer=f"{_CHANNEL}final{_MESSAGE}",
    thought=(f"{_CHANNEL}analysis{_MESSAGE}", f"{_END}{_START}assistant"),
    one_call=True,
)
