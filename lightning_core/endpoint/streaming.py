"""Decides which text of a response can be streamed while it is sampled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning_core.chat.chat import Chat
from lightning_core.chat.tool_calls.formats.base import ToolFormat
from lightning_core.dialects.exchange import ChatRequest

_RUN = 16
"""Tokens that are decoded with each new one while they form no character; a character has at most a few."""
_MOST_DECODED = 8
"""Tokens of a longer run are decoded up to this many times when text may follow it, which bounds the work."""


class RunningText:
    """The text of a response that is being sampled.

    Only new tokens are decoded, so the cost is not quadratic. The text of a long run of tokens that form no character is late: such a
    run is decoded each time it has grown by half, and when a token follows that is text by itself.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._settled = self._text = ""
        # Tokens from ``start`` on are decoded again with each new one, because earlier tokens can change a token's text (SentencePiece
        # drops a space at the beginning). Tokens up to ``end`` are in ``settled``; those after ``start`` have ``before`` characters of it.
        self._start = self._end = self._before = 0
        self._due = self._spent = 0

    @property
    def settled(self) -> int:
        """The number of characters that later tokens do not change."""
        return len(self._settled)

    def __call__(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, which extend the ids of the previous call."""
        size = len(token_ids)
        if size < self._due and not self._may_end(token_ids):
            return self._text
        self._spent += size - self._start
        fresh = self._decode(token_ids[self._start :])[self._before :]
        self._text = self._settled + fresh
        if fresh and not fresh.endswith("\ufffd"):  # an unfinished character
            self._settled = self._text
            self._start, self._end = self._end, size
            self._before = len(self._decode(token_ids[self._start : size]))
            self._due = self._spent = 0
        elif (run := size - self._end) > _RUN:
            self._due = size + run // 2
        return self._text

    def _may_end(self, token_ids: list[int]) -> bool:
        """Whether the last token may end a run of tokens that form no character."""
        if self._spent > _MOST_DECODED * (len(token_ids) - self._end):
            return False
        text = self._decode(token_ids[-1:])
        return bool(text) and "\ufffd" not in text


class StopSearch:
    """Whether the text of a response that is being sampled has one of ``stops``.

    Only new text is searched, with as much before it as a stop string may begin in.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: tuple[str, ...]) -> None:
        self._running = RunningText(decode)
        self._stops = stops
        self._overlap = _overlap(stops)
        self._searched: str | None = None

    def __call__(self, token_ids: list[int]) -> bool:
        """Whether there is a stop string. ``token_ids`` extend the ids of the previous call."""
        if not self._stops:
            return False
        start = max(self._running.settled - self._overlap, 0)
        text = self._running(token_ids)
        if text is self._searched:
            return False
        self._searched = text
        return any(text.find(stop, start) >= 0 for stop in self._stops)


def _overlap(marks: Sequence[str]) -> int:
    """The most characters of a text in which one of ``marks`` may begin that ends in later text."""
    return max(map(len, marks), default=1) - 1


_NEAR = 16
"""Longer than any text that begins a message or ends reasoning but for custom delimiters, which end in one of ``_CLOSERS``."""
_CLOSERS = ">]▷"
_MOST_SPLIT = 32
"""Splitting reads up to this many times the length of the text, which bounds the work; what it delays is sent later."""


def hold(chat: Chat, request: ChatRequest, *, thinking: bool) -> HeldText:
    """Holds the text of a response to ``request``. ``thinking``: the prompt began its reasoning."""
    split = _all_answer if request.prompts else partial(chat.split, thinking=thinking, final=False)
    return HeldText(RunningText(chat.text), split, request.stop, tools=chat.tool_format if request.has_tools else None)


def _all_answer(text: str) -> tuple[str, str]:
    """Completions of prompts without a chat do not separate reasoning."""
    return "", text


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
        self._marks = sorted((*stops, *tools.opens) if tools else stops)
        self._firsts = {mark[0] for mark in self._marks}
        self._overlap = _overlap(self._marks)
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
        if any(text.find(stop, max(before - len(stop), 0)) >= 0 for stop in self._stops):
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
        safe = min(len(rest.rstrip("\ufffd")), self._unfinished(rest))
        for mark in self._marks:
            at = rest.find(mark)
            if at >= 0:
                self._over = True
                safe = min(safe, at)
        if self._tools:
            safe = len(rest[:safe].rstrip())  # space before a tool call is not part of the text
        self._sent += safe
        return rest[:safe]

    def _unfinished(self, text: str) -> int:
        """Where a mark may begin that later text completes; the length of ``text`` if nowhere."""
        for at in range(max(len(text) - self._overlap, 0), len(text)):
            if text[at] in self._firsts:
                end = text[at:]
                place = bisect_left(self._marks, end)
                if place < len(self._marks) and self._marks[place].startswith(end):
                    return at
        return len(text)


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """``text`` before the first of ``stops``, and that stop string."""
    matches = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not matches:
        return text, None
    at, stop = min(matches)
    return text[:at], stop
