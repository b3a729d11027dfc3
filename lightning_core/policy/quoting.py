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
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)))

    def quote(self, value: Any) -> Any:
        """``value`` with all strings in it quoted, those of lists and objects (keys too) included."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._numbers[found[0]], value)
        if isinstance(value, Mapping):
            return {self.quote(key): self.quote(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.quote(item) for item in value]
        return value

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a rendered text in order; True for a quoted token, as it was before."""
        # re.split alternates between text and the numbers of quoted tokens
        for i, part in enumerate(_NUMBERED.split(text)):
            if i % 2:
                yield self._tokens[int(part)], True
            elif part:
                yield part, False
