"""Answers the first calls of a rollout from the record of another one, to sample one of its calls anew.

A recorded response answers the next request of the same agent with exactly the same prompt, so an agent that behaves as before
reaches the chosen call again, with the same history. A request that was not recorded is sampled as usual.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from lightning_core.trace import Call, pack

_Key = tuple[str | None, str | None, bytes]
"""Agent, model and the digest of the prompt's tokens. Of a call that was forwarded: agent, None and the digest of the messages,
since servers rename models."""


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
            # A worker of the endpoint gets them: without prompts, which repeat each other.
            self._calls[_key(call)].append(replace(call, messages=(), prompt_ids=None, tools=None))
        point = recording.point
        self._point: tuple[_Key, str] | None = (_key(point), point.forks or point.id)

    def take(self, agent: str | None, model: str, prompt_ids: Sequence[int]) -> Call | None:
        """The recorded call that answers this one; None to sample it."""
        return self._next((agent, model, _digest(pack(prompt_ids, "<u4"))))

    def take_forwarded(self, agent: str | None, messages: Sequence[object]) -> Call | None:
        """The recorded call that answers a forwarded call; None to forward it."""
        return self._next((agent, None, _text(messages)))

    def reach(self, agent: str | None, model: str, prompt_ids: Sequence[int]) -> str | None:
        """The id of the chosen call if this call is sampled in its place, else None."""
        if self._point is None or self._point[0] != (agent, model, _digest(pack(prompt_ids, "<u4"))):
            return None
        (_, call), self._point = self._point, None
        return call

    def _next(self, key: _Key) -> Call | None:
        left = self._calls.get(key)
        return left.popleft() if left else None


def _key(call: Call) -> _Key:
    if call.prompt_ids is None:
        return call.agent, None, _text(call.messages)
    return call.agent, call.model, _digest(call.prompt_ids.tobytes())


def _text(messages: Sequence[object]) -> bytes:
    return _digest(json.dumps(list(messages), ensure_ascii=False).encode(errors="backslashreplace"))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
