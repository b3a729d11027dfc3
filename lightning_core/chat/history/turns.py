"""The tokens of sampled responses and their prompts, which are kept with those of the spans, and of texts only the digests."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from lightning_core.content.shared_content import KeptIds

_PIECE = 1 << 16
"""Characters that are split at once: no other thread runs meanwhile."""


class TextPrint:
    """The length and digest of a text, and of the text without white space."""

    __slots__ = ("_growing", "digest", "length", "setting", "squeezed_digest", "squeezed_length")

    def __init__(self, text: str, setting: str = "", *, grows: bool = True) -> None:
        """``setting``: what it was rendered with. ``grows``: whether longer texts are `grown` from it, for which it keeps 1 KiB."""
        self.setting = setting
        self.length = self.squeezed_length = 0
        self._growing: tuple[Any, ...] | None = None
        self._append(text, (blake2b(digest_size=16), blake2b(digest_size=16)), grows=grows)

    def grown(self, added: str, setting: str) -> TextPrint | None:
        """Of the text with ``added`` after it; None after `stop_growing`."""
        growing = self._growing  # read once: another branch of the turn may stop it meanwhile
        if growing is None:
            return None
        longer = copy(self)
        longer.setting = setting
        longer._append(added, tuple(digest.copy() for digest in growing), grows=True)
        return longer

    def _append(self, text: str, digests: tuple[Any, ...], *, grows: bool) -> None:
        """Add ``text``. ``digests``: of what is before it, both of which are changed."""
        squeezed = squeeze(text)
        digests[0].update(text_bytes(text))
        digests[1].update(text_bytes(squeezed))
        self._growing = digests if grows else None
        self.length, self.digest = self.length + len(text), digests[0].digest()
        self.squeezed_length, self.squeezed_digest = self.squeezed_length + len(squeezed), digests[1].digest()

    @property
    def grows(self) -> bool:
        """Whether longer ones are grown from it."""
        return self._growing is not None

    def stop_growing(self) -> None:
        """Free what only longer texts need."""
        self._growing = None

    def starts(self, text: str) -> bool:
        """Whether ``text`` starts with it."""
        return _starts(text, self.length, self.digest)

    def after(self, text: str) -> str | None:
        """The text after it in ``text``, both without white space; None if ``text`` does not start with it."""
        squeezed = squeeze(text)
        return (
            squeezed[self.squeezed_length :] if _starts(squeezed, self.squeezed_length, self.squeezed_digest) else None
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """The tokens of a prompt and its response."""

    kept: KeptIds
    """All tokens."""
    text: TextPrint
    """Of the rendered prompt, with marks in place of recorded responses."""
    unmarked: frozenset[int]
    """The recorded responses before it, by number, that are written out in that text."""
    thinking: bool
    """Whether the prompt began the reasoning of the response."""
    ended: bool
    """Whether the tokens end with a stop token."""
    stopped: bool
    """Whether a stop string ended the response, so its tokens are those of the text before it."""
    order: int = 0

    def same(self, other: Turn) -> bool:
        """Whether ``other`` has the same tokens."""
        return self.kept == other.kept and self.stopped == other.stopped


def squeeze(text: str) -> str:
    """``text`` without white space."""
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return "".join(["".join(piece.split()) for piece in pieces])


def text_bytes(text: str) -> bytes:
    """``text`` in UTF-8, with lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def _starts(text: str, length: int, digest: bytes) -> bool:
    return len(text) >= length and blake2b(text_bytes(text[:length]), digest_size=16).digest() == digest
