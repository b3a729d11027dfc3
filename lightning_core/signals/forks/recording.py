"""Answers the first calls of a rollout from the record of another one, to sample one of its calls anew.

A recorded response answers the next request of the same agent with exactly the same prompt, so an agent that behaves as before
reaches the chosen call again, with the same history. A request that was not recorded is sampled as usual.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_core.trace import Call, pack

_Key = tuple[str | None, str | None, bytes]
"""Agent, model and the prompt's tokens. Of a call that was forwarded: agent, None and the messages, since servers rename models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The part of a recorded rollout to repeat. Called for each attempt."""

    calls: Sequence[Call]
    """The calls that are answered with their recorded responses."""
    point: Call
    """The call to sample anew."""

    @property
    def needed(self) -> list[Call]:
        """The calls that had ended before `point` began, whose responses it may depend on."""
        return [call for call in self.calls if call.end_ns <= self.point.start_ns]

    def __call__(self) -> Replay:
        return Replay(self)


class Replay:
    """The recorded responses that are left in one rollout."""

    def __init__(self, recording: Recording) -> None:
        self._calls: dict[_Key, deque[Call]] = defaultdict(deque)
        for call in recording.calls:
            self._calls[_key(call)].append(call)
        self._point: Call | None = recording.point

    def take(self, agent: str | None, model: str, prompt_ids: Sequence[int]) -> Call | None:
        """The recorded call that answers this one; None to sample it."""
        return self._next((agent, model, pack(prompt_ids, "<u4")))

    def take_forwarded(self, agent: str | None, messages: Sequence[object]) -> Call | None:
        """The recorded call that answers a forwarded call; None to forward it."""
        return self._next((agent, None, _text(messages)))

    def reach(self, agent: str | None, model: str, prompt_ids: Sequence[int]) -> str | None:
        """The id of the chosen call if this call is sampled in its place, else None."""
        point = self._point
        if point is None or _key(point) != (agent, model, pack(prompt_ids, "<u4")):
            return None
        self._point = None
        return point.forks or point.id

    def _next(self, key: _Key) -> Call | None:
        left = self._calls.get(key)
        return left.popleft() if left else None


def _key(call: Call) -> _Key:
    if call.prompt_ids is None:
        return call.agent, None, _text(call.messages)
    return call.agent, call.model, call.prompt_ids.tobytes()


def _text(messages: Sequence[object]) -> bytes:
    return json.dumps(list(messages), ensure_ascii=False).encode(errors="backslashreplace")
