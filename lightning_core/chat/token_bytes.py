"""The bytes of single tokens, also of those that are a part of a character."""

from __future__ import annotations

import re
from functools import lru_cache

from lightning_core.chat.chat import Chat

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte in vocabularies of SentencePiece."""
_SPACE = "\u2581"
_UNKNOWN = "\ufffd"


def _characters() -> dict[str, int]:
    """The bytes that the characters of a byte-level vocabulary stand for: printable ones for themselves, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _characters()
"""The byte of each character in byte-level vocabularies."""


def token_bytes(chat: Chat, token: int) -> bytes | None:
    """The bytes of ``token`` in responses of ``chat``: none if it is hidden; None if the vocabulary does not say."""
    return _vocabulary(chat)(token)


@lru_cache(maxsize=16)
def _vocabulary(chat: Chat) -> _Vocabulary:
    return _Vocabulary(chat)


class _Vocabulary:
    """The bytes of the tokens of one tokenizer, a Hugging Face one."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._added = frozenset(chat.tokenizer.get_added_vocab().values())
        line = chat.tokenizer.encode("\n", add_special_tokens=False, split_special_tokens=False)
        self._byte_level = any("\u010a" in self._written(token) for token in line)
        self._known: dict[int, bytes | None] = {}

    def __call__(self, token: int) -> bytes | None:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> bytes | None:
        text, written = self._chat.text([token]), self._written(token)
        if token in self._added or (not text and written.strip(_SPACE)):
            return text.encode()
        if self._byte_level:
            found = bytes(BYTE_OF[c] for c in written) if all(c in BYTE_OF for c in written) else b""
        elif byte := _BYTE.fullmatch(written):
            found = bytes([int(byte[1], 16)])
        else:
            found = written.replace(_SPACE, " ").encode()
        # SentencePiece leaves out a space before a single token.
        if found.decode(errors="replace").lstrip(" ") == text.lstrip(" "):
            return found
        return None if _UNKNOWN in text else text.encode()

    def _written(self, token: int) -> str:
        """``token`` as the vocabulary writes it, if it can be asked."""
        convert = getattr(self._chat.tokenizer, "convert_ids_to_tokens", None)
        written = None if convert is None else convert(token)
        return written.decode("latin-1") if isinstance(written, bytes) else str(written or "")
