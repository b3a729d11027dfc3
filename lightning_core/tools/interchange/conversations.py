"""The conversations of a rollout: calls whose prompt continues the call before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightning_core.trace import Call


@dataclass(slots=True)
class CallChain:
    """Calls of one agent with the same tools, each prompt of which begins with the prompt and response of the call before."""

    agent: str | None
    calls: list[Call] = field(default_factory=list[Call])

    def added(self, number: int) -> Sequence[Mapping[str, Any]]:
        """The messages of the prompt of call ``number`` that are not in the call before, nor its response."""
        before = len(self.calls[number - 1].messages) + 1 if number else 0
        return self.calls[number].messages[before:]


def call_chains(calls: Iterable[Call]) -> list[CallChain]:
    """The conversations of ``calls``, which are in order; each call is in one. A call that failed ends its conversation."""
    chains: list[CallChain] = []
    ends: list[list[Any] | None] = []
    for call in calls:
        prompt = [_key(message) for message in call.messages]
        place = next(
            (
                i
                for i in reversed(range(len(chains)))
                if chains[i].agent == call.agent
                and (end := ends[i]) is not None
                and prompt[: len(end)] == end
                and _tools(chains[i].calls[-1]) == _tools(call)
            ),
            None,
        )
        if place is None:
            place = len(chains)
            chains.append(CallChain(call.agent))
            ends.append(None)
        chains[place].calls.append(call)
        ends[place] = None if call.response is None else [*prompt, _key(call.response)]
    return chains


def is_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two messages have the same role, text and tool calls; clients write the rest in different ways."""
    return _key(first) == _key(second)


def _key(message: Mapping[str, Any]) -> Any:
    calls = [(call.get("id"), _function(call)) for call in message.get("tool_calls") or ()]
    return message.get("role"), plain_text(message), calls, message.get("tool_call_id")


def _function(call: Mapping[str, Any]) -> Any:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    with suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return function.get("name"), json.dumps(arguments, sort_keys=True)


def plain_text(message: Mapping[str, Any]) -> str:
    """The text of a message; that of its text parts, if it has parts."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def other_parts(message: Mapping[str, Any]) -> int:
    """The number of parts of a message that are no text, such as images."""
    content = message.get("content")
    parts = content if isinstance(content, (list, tuple)) else ()
    return sum(not isinstance(part, Mapping) or part.get("type") not in _TEXTS for part in parts)


_TEXTS = ("text", "input_text", "output_text")


def _tools(call: Call) -> str:
    return json.dumps(list(call.tools or ()), sort_keys=True)
