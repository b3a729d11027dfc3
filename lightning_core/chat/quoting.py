"""Text that must stay text: what looks like a special token in somebody's words is kept apart until it is encoded.

While a template is rendered, a quoted token stands as its number in brackets. The brackets are printable, so that a template may write
them as JSON or as Python does; where they occur in the text itself, they are quoted too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_LEFT, _RIGHT = "⸨", "⸩"
_NUMBERED = re.compile(f"{_LEFT}(\\d+){_RIGHT}")


def mark(name: str) -> str:
    """A text that no quoted text contains: a place to find again in what was rendered. ``name`` is a word, not a number."""
    return f"{_LEFT}{name}{_RIGHT}"


class Quoting:
    """Quotes ``tokens`` wherever they occur."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = sorted({*tokens, _LEFT, _RIGHT}, key=lambda t: (-len(t), t))
        self._numbers = {token: f"{_LEFT}{number}{_RIGHT}" for number, token in enumerate(self._tokens)}
        # Vocabularies have thousands of such tokens, too many for one pattern; but they begin with few letters, and have few lengths.
        self._lengths: dict[str, list[int]] = {}
        for token in self._tokens:
            if len(token) not in (lengths := self._lengths.setdefault(token[0], [])):
                lengths.append(len(token))
        self._first = re.compile("[" + "".join(map(re.escape, self._lengths)) + "]")

    def quote(self, value: Any) -> Any:
        """``value`` with all strings in it quoted, those of lists and objects (keys too) included."""
        if isinstance(value, str):
            return self._quote(value)
        if isinstance(value, Mapping):
            return {self.quote(key): self.quote(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.quote(item) for item in value]
        return value

    def _quote(self, text: str) -> str:
        parts: list[str] = []
        done = 0
        for found in self._first.finditer(text):
            at = found.start()
            if at < done:
                continue
            # The longest token that begins here
            token = next((t for n in self._lengths[found[0]] if (t := text[at : at + n]) in self._numbers), None)
            if token is not None:
                parts += [text[done:at], self._numbers[token]]
                done = at + len(token)
        return "".join([*parts, text[done:]])

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a rendered text in order; True for a quoted token, as it was before."""
        # re.split alternates between text and the numbers of quoted tokens
        for i, part in enumerate(_NUMBERED.split(text)):
            if i % 2:
                yield self._tokens[int(part)], True
            elif part:
                yield part, False
