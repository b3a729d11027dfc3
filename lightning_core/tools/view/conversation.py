"""Messages as they are shown, and which of a call's messages its agent had already sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_core.errors import shorten
from lightning_core.trace import Call

LIMIT = 20_000
"""Number of characters of a text that is shown in full on a rollout's page."""


class ShownToolCall(NamedTuple):
    """A tool call of a message."""

    name: str
    arguments: str
    """Indented, if it is JSON."""
    id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """A message of any form, as text."""

    role: str
    text: str
    reasoning: str
    tool_calls: Sequence[ShownToolCall]
    answers: str | None
    """The id of the tool call that it answers."""
    left_out: int = 0
    """Number of characters at the end of ``text`` that are not shown."""


def show_message(message: Any, *, limit: int | None = LIMIT) -> ShownMessage:
    """``message`` with at most ``limit`` characters of its text; None: the whole text."""
    if not isinstance(message, Mapping):
        message = {"role": "?", "content": json.dumps(message, ensure_ascii=False)}
    text = content_text(message.get("content", message.get("parts")))
    calls = message.get("tool_calls")
    shown = text if limit is None else text[:limit]
    answers = message.get("tool_call_id")
    return ShownMessage(
        role=str(message.get("role", "?")),
        text=shown,
        reasoning=content_text(message.get("reasoning_content") or message.get("reasoning")),
        tool_calls=[_tool_call(call) for call in (calls if isinstance(calls, list) else [])],
        answers=answers if isinstance(answers, str) else None,
        left_out=len(text) - len(shown),
    )


def content_text(content: Any) -> str:
    """A message's content as text: a string, or its parts, with a name in place of parts that are not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False, indent=2)
    return "\n".join(map(_part_text, content))


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    text = part.get("text", part.get("content"))
    return text if isinstance(text, str) else f"⟨{part.get('type', 'part')}⟩"


def _tool_call(call: Any) -> ShownToolCall:
    if not isinstance(call, Mapping):
        return ShownToolCall("?", json.dumps(call, ensure_ascii=False), None)
    function = call.get("function")
    named = function if isinstance(function, Mapping) else call
    identity = call.get("id")
    name = str(named.get("name", "?"))
    return ShownToolCall(name, indented(named.get("arguments", "")), identity if isinstance(identity, str) else None)


def indented(value: Any) -> str:
    """``value``, or the JSON that it is the text of, as indented JSON; any other text unchanged."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, ensure_ascii=False, indent=2)


def repeated_messages(calls: Iterable[Call]) -> dict[str, int]:
    """The number of first messages that each call shares, in order, with an earlier call of its agent.

    The earlier call's response counts as a message, even if the client sent it back in another form.
    """
    known: set[int] = set()
    answered: set[int] = set()
    counts: dict[str, int] = {}
    for call in calls:
        # Each beginning as one hash, so long conversations are compared in linear time.
        keys = [hash(call.agent)]
        for message in call.messages:
            keys.append(hash((keys[-1], repr(message))))
        count = max((i for i, key in enumerate(keys) if key in known), default=0)
        if count and keys[count] in answered and count < len(call.messages):
            count += _role(call.messages[count]) == "assistant"
        counts[call.id] = count
        known.update(keys[1:])
        if call.messages:
            answered.add(keys[-1])
    return counts


def _role(message: Any) -> str:
    return str(message.get("role")) if isinstance(message, Mapping) else "?"


def final_answer(calls: Sequence[Call], *, limit: int = 300) -> str:
    """The last response of a trained agent, or of any agent if none is trained, on one line of at most ``limit`` characters."""
    answered = [call for call in calls if call.response is not None]
    last = next(reversed([call for call in answered if call.trained] or answered), None)
    if last is None:
        return ""
    shown = show_message(last.response)
    calls_made = [f"{call.name}({' '.join(call.arguments.split())})" for call in shown.tool_calls]
    return shorten(" ".join([*shown.text.split(), *calls_made]), limit)
