"""The text formats of tool calls: one `ToolFormat` for each format, not for each model.

Parsing is strict: well-formed calls are removed from the text, malformed ones stay in it. ``template.py`` finds the format of a model in
its chat template.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from lightning_core.chat.tool_calls.arguments import parameters_of, typed
from lightning_core.chat.tool_calls.call_ids import IdStyle
from lightning_core.chat.tool_calls.formats.base import ToolCall, ToolFormat
from lightning_core.chat.tool_calls.formats.harmony import HARMONY
from lightning_core.chat.tool_calls.formats.json_calls import HERMES, LLAMA, MISTRAL, PHI
from lightning_core.chat.tool_calls.formats.literal_calls import GEMMA, LFM, PYTHONIC
from lightning_core.chat.tool_calls.formats.named_calls import DEEPSEEK, KIMI
from lightning_core.chat.tool_calls.formats.xml_calls import DSML, FUNCTIONS, MINIMAX, PAIRS
from lightning_core.chat.tool_calls.nesting import is_too_deep, valid_unicode

FORMATS: tuple[ToolFormat, ...] = (
    HERMES, PHI, MISTRAL, DEEPSEEK, FUNCTIONS, PAIRS, KIMI, MINIMAX, *DSML, GEMMA, LFM, HARMONY, LLAMA, PYTHONIC,
)  # fmt: skip
"""All formats, those with unambiguous marks first."""


def read_message(
    form: ToolFormat | None, text: str, *, ids: IdStyle = IdStyle.ANY, tools: Sequence[Any] = (), is_json: bool = False
) -> dict[str, Any]:
    """The assistant message in ``text``, with its tool calls if there is a format for them.

    ``tools``: the definitions, whose schemas give the types of arguments if the format does not write them. ``is_json``: the message is
    calls or JSON, which may contain the text of a call, or be an object like one.
    """
    content, calls = (text, []) if form is None else form.read(text)
    if form is not None and is_json and form.is_json(text):
        names = {tool["function"]["name"] for tool in tools} if form.bare else set[str]()
        if not all(call.name in names for call in calls):
            content, calls = text, []
    if any(is_too_deep(call.arguments) for call in calls):  # no client can send them back
        content, calls = text, []
    message: dict[str, Any] = {"role": "assistant", "content": (content.rstrip() or None) if calls else content}
    if calls:
        parameters = parameters_of(tools) if any(call.untyped for call in calls) else {}
        written_ids = _own_ids(calls, ids)
        message["tool_calls"] = [
            _to_openai(typed(call, parameters.get(call.name)), ids, identifier)
            for call, identifier in zip(calls, written_ids, strict=True)
        ]
    return message


def _own_ids(calls: Sequence[ToolCall], ids: IdStyle) -> list[str | None]:
    """The ids that the model wrote, so it finds them in the results; None where they are unusable or repeated."""
    seen: set[str | None] = {None}
    ids_in_order: list[str | None] = []
    for call in calls:
        usable = call.id is not None and ids is not IdStyle.ANY and ids.accepts(call.id) and call.id not in seen
        ids_in_order.append(call.id if usable else None)
        seen.add(call.id)
    return ids_in_order


def _to_openai(call: ToolCall, ids: IdStyle, identifier: str | None) -> dict[str, Any]:
    written = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    made = uuid.uuid4().hex[:9] if ids is IdStyle.SHORT else f"call_{uuid.uuid4().hex[:24]}"
    return {
        "id": identifier or made,
        "type": "function",
        "function": {"name": valid_unicode(call.name), "arguments": valid_unicode(written)},
    }
