"""The conversations of a rollout: calls whose prompt continues the call before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_core.chat.history.message_key import message_key
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
        prompt = [message_key(message) for message in call.messages]
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
        ends[place] = None if call.response is None else [*prompt, message_key(call.response)]
    return chains


def is_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two messages have the same `message_key`."""
    return message_key(first) == message_key(second)


def _tools(call: Call) -> str:
    return json.dumps(list(call.tools or ()), sort_keys=True)
