"""Decides which text of a response can be streamed while it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_core.chat.tool_formats import ToolFormat


class RunningText:
    """The text of a response that is being sampled.

    Only new tokens are decoded, so that the cost is not quadratic.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._settled = ""
        # Tokens from ``start`` on are decoded again with each new one, because earlier tokens can change a token's text (SentencePiece
        # drops a space at the beginning). Tokens up to ``end`` are in ``settled``.
        self._start = self._end = 0

    def __call__(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, which start with those of the last call."""
        before = self._decode(token_ids[self._start : self._end])
        fresh = self._decode(token_ids[self._start :])[len(before) :]
        if fresh and not fresh.endswith("\ufffd"):  # an unfinished character
            self._settled += fresh
            self._start, self._end = self._end, len(token_ids)
            return self._settled
        return self._settled + fresh


class HeldText:
    """Holds text back until later tokens cannot change it.

    Reasoning is returned once, when it has ended.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        split: Callable[[str], tuple[str, str | None]],
        stops: tuple[str, ...],
        *,
        tools: ToolFormat | None,
    ) -> None:
        self._decode = decode
        self._split = split
        self._stops = stops
        self._tools = tools
        self._marks = (*stops, *tools.opens) if tools else stops
        self._thought = ""
        self._sent = ""

    def more(self, token_ids: list[int]) -> tuple[str, str]:
        """New reasoning and new text."""
        text, _ = cut(self._decode(token_ids), self._stops)
        thought, answer = self._split(text)
        if answer is None:
            return "", ""
        fresh = self._text(answer)
        return self._new_thought(thought), fresh

    def rest(self, message: Mapping[str, Any]) -> tuple[str, str]:
        """The reasoning and text of the complete ``message`` that were not returned yet."""
        return self._new_thought(message.get("reasoning_content") or ""), (message.get("content") or "")[
            len(self._sent) :
        ]

    def _new_thought(self, thought: str) -> str:
        if self._thought:
            return ""
        self._thought = thought
        return thought

    def _text(self, text: str) -> str:
        if self._tools and self._tools.bare and text.lstrip().startswith("{"):
            return ""
        safe = len(text.rstrip("\ufffd"))  # an unfinished character
        for mark in self._marks:
            at = text.find(mark)
            if at >= 0:
                safe = min(safe, at)
            for size in range(1, len(mark)):
                if text.endswith(mark[:size]):
                    safe = min(safe, len(text) - size)
        if self._tools:
            safe = len(text[:safe].rstrip())  # space before a tool call is not part of the text
        fresh = text[len(self._sent) : safe]
        self._sent += fresh
        return fresh


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """``text`` before the first of ``stops``, and that stop string."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return text, None
    at, stop = min(found)
    return text[:at], stop
