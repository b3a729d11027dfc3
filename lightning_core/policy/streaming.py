"""What may be said already of a response that is still being sampled."""

from __future__ import annotations

from collections.abc import Callable


class HeldText:
    """Decides how much of a response's text may be streamed already."""

    def __init__(self, decode: Callable[[list[int]], str], stops: tuple[str, ...], *, tools: bool) -> None:
        self._decode = decode
        self._tools = tools
        self._marks = (*stops, "<tool_call>") if tools else stops
        self._sent = ""

    def more(self, token_ids: list[int]) -> str:
        """New text that nothing later can change."""
        text = self._decode(token_ids)
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

    def rest(self, content: str) -> str:
        """What remains of the final ``content``."""
        return content[len(self._sent) :]


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """``text`` before the earliest of ``stops``, and which of them that was."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return text, None
    at, stop = min(found)
    return text[:at], stop
