"""Decides which text of a response can be streamed while it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_core.chat.formats.base import ToolFormat


class RunningText:
    """The text of a response that is being sampled.

    Only new tokens are decoded, so the cost is not quadratic.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._settled = ""
        # Tokens from ``start`` on are decoded again with each new one, because earlier tokens can change a token's text (SentencePiece
        # drops a space at the beginning). Tokens up to ``end`` are in ``settled``.
        self._start = self._end = 0

    def __call__(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, which extend the ids of the previous call."""
        before = self._decode(token_ids[self._start : self._end])
        fresh = self._decode(token_ids[self._start :])[len(before) :]
        if fresh and not fresh.endswith("\ufffd"):  # an unfinished character
            self._settled += fresh
            self._start, self._end = self._end, len(token_ids)
            return self._settled
        return self._settled + fresh


_NEAR = 16
"""Longer than any text that begins a message or ends reasoning but for custom delimiters, which end in one of ``_CLOSERS``."""
_CLOSERS = ">]▷"
_MOST_SPLIT = 32
"""Splitting reads up to this many times the length of the text, which bounds the work; what it delays is sent later."""


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
        self._size = self._seen = self._spent = self._sent = 0
        self._answer: str | None = None
        """The answer, if more text is more answer as long as it has no tags."""
        self._begun = self._over = False

    def more(self, token_ids: list[int]) -> tuple[str, str]:
        """New reasoning and new text."""
        text = self._decode(token_ids)
        blank = not text[self._size :].strip()
        self._size = len(text)
        # Space may precede a call; the others are an unfinished character and the start of a token.
        if self._over or blank or text.endswith(("\ufffd", "<")):
            return "", ""
        fresh = text[self._seen :]
        near = text[max(self._seen - _NEAR, 0) :]
        before, self._seen = self._seen, len(text)
        if any(stop in text[max(before - len(stop), 0) :] for stop in self._stops):
            self._over = True
            text, _ = cut(text, self._stops)
        elif self._answer is not None and "<|" not in near:
            self._answer += fresh
            return "", self._text(self._answer)
        elif not (self._begun or len(text) <= 4 * _NEAR or any(mark in near for mark in _CLOSERS)):
            return "", ""
        if self._spent > _MOST_SPLIT * len(text):
            self._answer = None
            return "", ""
        self._spent += len(text)
        thought, answer = self._split(text)
        if answer is None:
            return "", ""
        self._begun = True
        plain = "<|" not in text[-_NEAR:] and text[-_NEAR:] == answer[-_NEAR:]
        self._answer = answer if plain else None
        return self._new_thought(thought), self._text(answer)

    def rest(self, message: Mapping[str, Any]) -> tuple[str, str]:
        """The reasoning and text of the complete ``message`` that were not returned yet."""
        return self._new_thought(message.get("reasoning_content") or ""), (message.get("content") or "")[self._sent :]

    def _new_thought(self, thought: str) -> str:
        if self._thought:
            return ""
        self._thought = thought
        return thought

    def _text(self, text: str) -> str:
        if not self._sent and self._tools and self._tools.bare and text.lstrip().startswith(self._tools.bare):
            self._over = True
            return ""
        rest = text[self._sent :]
        safe = len(rest.rstrip("\ufffd"))
        for mark in self._marks:
            at = rest.find(mark)
            if at >= 0:
                self._over = True
                safe = min(safe, at)
            for size in range(1, len(mark)):
                if rest.endswith(mark[:size]):
                    safe = min(safe, len(rest) - size)
        if self._tools:
            safe = len(rest[:safe].rstrip())  # space before a tool call is not part of the text
        self._sent += safe
        return rest[:safe]


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """``text`` before the first of ``stops``, and that stop string."""
    matches = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not matches:
        return text, None
    at, stop = min(matches)
    return text[:at], stop
