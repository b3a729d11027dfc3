"""Finds state that outlives its rollout: text that was sampled in one rollout, in the first prompt of another."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_core.trace import Call, Trace

_MOST_KEPT = 200_000
"""Exchanges of the newest rollouts."""

Exchange = tuple[str, str]
"""A message and the response to it."""


class SharedState:
    """What earlier rollouts sampled, and how many rollouts began with some of it. Thread-safe."""

    def __init__(self) -> None:
        self._sampled: dict[int, None] = {}
        self._found = self._rollouts = 0
        self._lock = threading.Lock()

    def add(self, trace: Trace) -> bool:
        """Add a rollout that ended. Returns whether a first prompt in it has a response of an earlier one.

        Only the first and the last call of each agent are read. Examples in its first prompt were not sampled.
        """
        calls: dict[str | None, list[Call]] = {}
        for call in trace.calls:
            if call.response is not None and call.error is None:
                calls.setdefault(call.agent, []).append(call)
        shown = {agent: set(_exchanges(own[0].messages)) for agent, own in calls.items()}
        sampled: set[Exchange] = set()
        for agent, own in calls.items():
            sampled |= {*_exchanges([*own[-1].messages, own[-1].response or {}])} - shown[agent]
        first = {hash(exchange) for exchanges in shown.values() for exchange in exchanges - sampled}
        with self._lock:
            found = not first.isdisjoint(self._sampled)
            self._found, self._rollouts = self._found + found, self._rollouts + 1
            self._sampled |= dict.fromkeys(map(hash, sampled))
            for _ in range(len(self._sampled) - _MOST_KEPT):
                del self._sampled[next(iter(self._sampled))]
        return found

    def take(self) -> float | None:
        """The share of rollouts with earlier responses since the last call; None without rollouts."""
        with self._lock:
            share = self._found / self._rollouts if self._rollouts else None
            self._found = self._rollouts = 0
        return share


def _exchanges(messages: Sequence[Mapping[str, Any]]) -> Iterator[Exchange]:
    for before, message in pairwise(messages):
        if message.get("role") == "assistant" and (said := _text(message)):
            yield _text(before), said


def _text(message: Mapping[str, Any]) -> str:
    """The text and the tool calls of ``message``, without the ids that clients change."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [p.get("text") or "" for p in content if isinstance(p, Mapping)]
    functions = [t.get("function") or {} for t in message.get("tool_calls") or ()]
    return "\n".join((*parts, *(f"{f.get('name')}({f.get('arguments')})" for f in functions))).strip()
