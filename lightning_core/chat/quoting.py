"""Quotes text that looks like a special token, so it is encoded as plain text.

While a template is rendered, a quoted token is replaced by its number in brackets. The brackets are printable, so templates may
serialize them as JSON or Python; brackets in the text itself are quoted too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_LEFT, _RIGHT = "⸨", "⸩"
_NUMBERED = re.compile(f"{_LEFT}(\\d+){_RIGHT}")
_NAMED = re.compile(f"{_LEFT}[a-z-]+\\d*{_RIGHT}")
_SPAN = re.compile(f"{_LEFT}(from|to)(\\d+){_RIGHT}")
_PIECE = 1 << 15
"""Characters that are searched at once: a fraction of a millisecond, in which no other thread runs."""


def mark(name: str) -> str:
    """A marker that no quoted text contains, to find a place in rendered text.

    ``name``: begins with a letter.
    """
    return f"{_LEFT}{name}{_RIGHT}"


def has_mark(text: str) -> bool:
    """Whether ``text``, quoted, has a marker of `mark`."""
    return _NAMED.search(text) is not None


def mark_span(text: str, number: int) -> str:
    """``text``, quoted, with markers around it inside of its outer white space; blank text is unchanged."""
    inner = text.strip()
    if not inner:
        return text
    start = text.index(inner)
    return f"{text[:start]}{mark(f'from{number}')}{inner}{mark(f'to{number}')}{text[start + len(inner) :]}"


def take_spans(text: str) -> tuple[str, dict[int, tuple[int, int]]]:
    """``text`` without the markers of `mark_span`, and the characters between them: number → (start, stop).

    Text that is rendered more than once has its first place.
    """
    parts: list[str] = []
    open_at: dict[int, int] = {}
    spans: dict[int, tuple[int, int]] = {}
    length = 0
    pieces = _SPAN.split(text)
    for i in range(0, len(pieces), 3):
        parts.append(pieces[i])
        length += len(pieces[i])
        if i + 2 < len(pieces):
            number = int(pieces[i + 2])
            if pieces[i + 1] == "from":
                open_at[number] = length
            elif number in open_at:
                spans.setdefault(number, (open_at[number], length))
    return "".join(parts), spans


class Quoting:
    """Quotes every occurrence of ``tokens``."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = sorted({*tokens, _LEFT, _RIGHT}, key=lambda t: (-len(t), t))
        self._numbers = {token: f"{_LEFT}{number}{_RIGHT}" for number, token in enumerate(self._tokens)}
        # Vocabularies have thousands of such tokens, too many for one pattern, but with few first letters and lengths.
        self._lengths: dict[str, list[int]] = {}
        for token in self._tokens:
            if len(token) not in (lengths := self._lengths.setdefault(token[0], [])):
                lengths.append(len(token))
        self._first = re.compile("[" + "".join(map(re.escape, self._lengths)) + "]")

    def quote(self, value: Any) -> Any:
        """``value`` with all strings quoted, including those in lists and objects and their keys."""
        if isinstance(value, str):
            return self._quote(value)
        if isinstance(value, Mapping):
            return {self.quote(key): self.quote(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.quote(item) for item in value]
        return value

    def _quote(self, text: str) -> str:
        if not any(first in text for first in self._lengths):  # many times faster than the pattern
            return text
        parts: list[str] = []
        done = 0
        for match in self._starts(text):
            at = match.start()
            if at < done:
                continue
            # The longest token at this position
            token = next((t for n in self._lengths[match[0]] if (t := text[at : at + n]) in self._numbers), None)
            if token is not None:
                parts += [text[done:at], self._numbers[token]]
                done = at + len(token)
        return "".join([*parts, text[done:]]) if parts else text

    def _starts(self, text: str) -> Iterator[re.Match[str]]:
        """The characters of ``text`` that tokens start with."""
        for start in range(0, len(text), _PIECE):
            yield from self._first.finditer(text, start, start + _PIECE)

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a rendered text in order, with True for quoted tokens, which are restored."""
        if _LEFT not in text:  # many times faster than the pattern
            if text:
                yield text, False
            return
        # re.split alternates between text and the numbers of quoted tokens
        for i, part in enumerate(_NUMBERED.split(text)):
            if i % 2:
                yield self._tokens[int(part)], True
            elif part:
                yield part, False
