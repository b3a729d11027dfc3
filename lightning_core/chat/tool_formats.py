"""The text formats of tool calls: one `ToolFormat` for each format, not for each model.

Parsing is strict: well-formed calls are removed from the text, malformed ones stay in it. ``template.py`` finds the format of a model in
its chat template.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn


class ToolCall(NamedTuple):
    """A tool call in the text of a response."""

    name: str
    arguments: Any
    """An object, or a string if the model wrote one."""
    id: str | None = None


SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
"""The call ids that Mistral's templates accept."""

Reading = tuple[str, list[ToolCall]]
"""The text around the calls, concatenated, and the calls in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One format of tool calls.

    `read` and `write` are pure, and `read` parses what `write` returns.
    """

    name: str
    opens: tuple[str, ...]
    """Texts at the start of a call. Streamed text is held back from there on."""
    marks: tuple[str, ...]
    """All texts around calls. Those that are special tokens are kept when decoding."""
    read: Callable[[str], Reading]
    write: Callable[[Sequence[ToolCall]], str]
    bare: bool = False
    """Whether a response that starts with ``{`` may be a call."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = re.compile(r"\s*")


def _skip(text: str, at: int) -> int:
    """The first index at or after ``at`` that is not white space."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _json(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value at index ``at``, and its end."""
    try:
        return _DECODER.raw_decode(text, _skip(text, at))
    except (ValueError, RecursionError):
        return None


def _calls(value: Any, *, complete: bool = False) -> list[ToolCall] | None:
    """The calls in a JSON value; None if it is not a call.

    ``complete``: the arguments are required.
    """
    values = value if isinstance(value, list) else [value]
    calls: list[ToolCall] = []
    for item in values:
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
            return None
        key = next((k for k in ("arguments", "parameters") if k in item), None)
        arguments = {} if key is None or item[key] is None else item[key]
        if (complete and key is None) or not isinstance(arguments, (Mapping, str)):
            return None
        given = item.get("id")
        calls.append(ToolCall(item["name"], arguments, given if isinstance(given, str) else None))
    return calls or None


def _object(call: ToolCall, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def _read_blocks(text: str, opening: str, read_one: Callable[[str, int], tuple[list[ToolCall], int] | None]) -> Reading:
    """Remove each block after ``opening`` that ``read_one`` parses."""
    content: list[str] = []
    calls: list[ToolCall] = []
    done = 0
    at = text.find(opening)
    while at >= 0:
        found = read_one(text, at + len(opening))
        if found is None:
            at = text.find(opening, at + len(opening))
            continue
        content.append(text[done:at])
        calls += found[0]
        done = found[1]
        at = text.find(opening, done)
    return "".join([*content, text[done:]]), calls


def _tagged_one(text: str, at: int, *, closing: str, opening: str) -> tuple[list[ToolCall], int] | None:
    found = _json(text, at)
    calls = None if found is None else _calls(found[0])
    if found is None or calls is None:
        return None
    end = _skip(text, found[1])
    if text.startswith(closing, end):
        return calls, end + len(closing)
    # A missing closing tag is accepted at the end of the text and before another call.
    return (calls, end) if end == len(text) or text.startswith(opening, end) else None


def tagged(name: str, opening: str, closing: str, *, as_list: bool = False) -> ToolFormat:
    """JSON between tags: one call in each pair, or with ``as_list`` all in one pair."""

    def write(calls: Sequence[ToolCall]) -> str:
        if as_list:
            return f"{opening}[{', '.join(map(_object, calls))}]{closing}"
        return "\n".join(f"{opening}{_object(call)}{closing}" for call in calls)

    one = partial(_tagged_one, closing=closing, opening=opening)
    return ToolFormat(
        name=name,
        opens=(opening,),
        marks=(opening, closing),
        read=lambda text: _read_blocks(text, opening, one),
        write=write,
    )


_PYTHON_TAG = "<|python_tag|>"


def _read_llama(text: str) -> Reading:
    """JSON objects separated by semicolons, after the tag or as the whole answer."""
    before, tag, body = text.partition(_PYTHON_TAG)
    if not tag or before.lstrip().startswith("{"):
        before, body = "", text
    calls: list[ToolCall] = []
    at = _skip(body, 0)
    while at < len(body):
        found = _json(body, at) if body[at] == "{" else None
        read = None if found is None else _calls(found[0], complete=True)
        if found is None or read is None:
            return text, []
        calls += read
        at = _skip(body, found[1])
        if body.startswith(";", at):
            at = _skip(body, at + 1)
    return (before, calls) if calls else (text, [])


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]([\w-]+))?(?:\[ARGS\])?\s*(?=\{)")


def _read_mistral_block(text: str, at: int) -> tuple[list[ToolCall], int] | None:
    """A list of calls, or in later versions one name with its arguments."""
    named = _MISTRAL_NAME.match(text, at)
    found = _json(text, at if named is None else named.end())
    if found is None:
        return None
    value, end = found
    if named is not None:
        return [ToolCall(named[1], value, named[2])], end
    calls = _calls(value) if isinstance(value, list) else None
    return None if calls is None else (calls, end)


def _write_mistral(calls: Sequence[ToolCall]) -> str:
    return f"{_MISTRAL}[{', '.join(map(_object, calls))}]"


_DS_CALLS, _DS_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_CALL_END, _DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DS_FENCE = "```"


def _read_deepseek_block(text: str, at: int) -> tuple[list[ToolCall], int] | None:
    """``function SEP name, fenced JSON`` (V3, R1), or ``name SEP JSON`` (V3.1)."""
    head, sep, _ = text[at:].partition(_DS_SEP)
    if not sep or _DS_CALL_END in head:
        return None
    at += len(head) + len(sep)
    name = head.strip()
    if name == "function":
        line, fence, _ = text[at:].partition(f"{_DS_FENCE}json")
        if not fence:
            return None
        name, at = line.strip(), at + len(line) + len(fence)
    found = _json(text, at)
    if found is None or not name or not isinstance(found[0], Mapping):
        return None
    end = _skip(text, found[1])
    if text.startswith(_DS_FENCE, end):
        end = _skip(text, end + len(_DS_FENCE))
    return ([ToolCall(name, found[0])], end + len(_DS_CALL_END)) if text.startswith(_DS_CALL_END, end) else None


def _read_deepseek(text: str) -> Reading:
    content, calls = _read_blocks(text, _DS_CALL, _read_deepseek_block)
    if calls and _DS_CALL not in content:
        # Remove the tags around the calls, too, if nothing malformed is left between them.
        before, _, frame = content.partition(_DS_CALLS)
        inside, _, after = frame.partition(_DS_CALLS_END)
        content = before + (inside.strip() and inside) + after.replace(_DS_CALLS_END, "")
    return content, calls


def _write_deepseek(calls: Sequence[ToolCall]) -> str:
    written = "\n".join(
        f"{_DS_CALL}function{_DS_SEP}{call.name}\n{_DS_FENCE}json\n{json.dumps(call.arguments, ensure_ascii=False)}\n"
        f"{_DS_FENCE}{_DS_CALL_END}"
        for call in calls
    )
    return f"{_DS_CALLS}{written}{_DS_CALLS_END}"


HERMES = tagged("hermes", "<tool_call>", "</tool_call>")
FORMATS: tuple[ToolFormat, ...] = (
    HERMES,
    tagged("phi", "<|tool_call|>", "<|/tool_call|>", as_list=True),
    ToolFormat(
        name="mistral",
        opens=(_MISTRAL,),
        marks=(_MISTRAL, "[ARGS]", "[CALL_ID]"),
        read=lambda text: _read_blocks(text, _MISTRAL, _read_mistral_block),
        write=_write_mistral,
    ),
    ToolFormat(
        name="deepseek",
        opens=(_DS_CALLS, _DS_CALL),
        marks=(_DS_CALLS, _DS_CALLS_END, _DS_CALL, _DS_CALL_END, _DS_SEP),
        read=_read_deepseek,
        write=_write_deepseek,
    ),
    ToolFormat(
        name="llama",
        opens=(_PYTHON_TAG,),
        marks=(_PYTHON_TAG,),
        read=_read_llama,
        write=lambda calls: "; ".join(_object(call, "parameters") for call in calls),
        bare=True,
    ),
)
"""All formats, those with unambiguous marks first."""


def read_message(tools: ToolFormat | None, text: str, *, short_ids: bool = False) -> dict[str, Any]:
    """The assistant message in ``text``, with its tool calls if there is a format for them."""
    content, calls = (text, []) if tools is None else tools.read(text)
    message: dict[str, Any] = {"role": "assistant", "content": (content.rstrip() or None) if calls else content}
    if calls:
        message["tool_calls"] = [_to_openai(call, short_ids=short_ids) for call in calls]
    return message


def _to_openai(call: ToolCall, *, short_ids: bool) -> dict[str, Any]:
    written = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    # Ids that the model wrote are kept, so that it finds them in the results.
    own = call.id is not None and short_ids and SHORT_ID.fullmatch(call.id)
    made = uuid.uuid4().hex[:9] if short_ids else f"call_{uuid.uuid4().hex[:24]}"
    return {
        "id": call.id if own else made,
        "type": "function",
        "function": {"name": _valid_unicode(call.name), "arguments": _valid_unicode(written)},
    }


def _valid_unicode(text: str) -> str:
    """``text`` with U+FFFD for lone surrogates, which JSON can escape, but no response can contain as UTF-8."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
