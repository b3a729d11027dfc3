"""Encodes rendered text in parts, so quoted special tokens stay plain text, and decodes sampled tokens."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_core.chat.quoting import Quoting
from lightning_core.chat.raw_template import Tokenizer


class Encoder:
    """Encodes and decodes with ``tokenizer``. ``specials``: its special tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, quoting: Quoting, specials: Iterable[str]) -> None:
        self._fast = _fast(tokenizer)
        self._splitting: Any = None
        self.lock: AbstractContextManager[Any] = threading.Lock() if self._fast is None else nullcontext()
        """Tokenizers in Python may change their own state. Fast ones do not here, so no text waits for another."""
        self.special_ids = {tokenizer.convert_tokens_to_ids(t) for t in specials}
        self._tokenizer = tokenizer
        self._quoting = quoting
        self._plain: dict[str, list[int]] = {}
        # SentencePiece adds a space before a text, so parts of a text are encoded after a line feed.
        self._line: list[int] = []
        x, line, line_x = (self.encode(t) for t in ("x", "\n", "\nx"))
        if line_x != line + x:
            self._line = line

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Ids of a rendered text. ``start``: it is the start of the prompt."""
        ids: list[int] = []
        with self.lock:
            for piece, quoted in self._quoting.pieces(text):
                ids += self._encode_plain(piece) if quoted else self._encode_piece(piece, start=start and not ids)
        return ids

    def spans(self, text: str, *, start: bool = True) -> list[tuple[int, int]]:
        """The characters of ``text`` that each id of `encode` covers. Needs a fast tokenizer."""
        spans: list[tuple[int, int]] = []
        at = 0
        with self.lock:
            for piece, quoted in self._quoting.pieces(text):
                width = len(self._quoting.quote(piece)) if quoted else len(piece)
                if quoted:
                    spans += [(at, at + width)] * len(self._encode_plain(piece))
                else:
                    spans += [(at + a, at + b) for a, b in self._piece_spans(piece, start=start and not spans)]
                at += width
        return spans

    def decode(self, token_ids: list[int], *, skip: bool = False) -> str:
        """The text of tokens. ``skip``: without special tokens."""
        with self.lock:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    def _encode_plain(self, token: str) -> list[int]:
        """Ids of a special token as plain text.

        Tokenizers split only some of their special tokens.
        """
        if token not in self._plain:
            ids = self._encode_piece(token, split=True)
            if len(token) > 1 and not self.special_ids.isdisjoint(ids):
                ids = self._encode_plain(token[0]) + self._encode_plain(token[1:])
            self._plain[token] = ids
        return self._plain[token]

    def _encode_piece(self, text: str, *, split: bool = False, start: bool = False) -> list[int]:
        if self._line and not start:
            ids = self._ids(f"\n{text}", split=split)
            if ids[: len(self._line)] == self._line:
                return ids[len(self._line) :]
        return self._ids(text, split=split)

    def _ids(self, text: str, *, split: bool) -> list[int]:
        if self._fast is None:
            return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split)
        if split and self._splitting is None:  # whether special tokens are split is a state of the tokenizer
            self._splitting = copy.deepcopy(self._fast)
        fast = self._splitting if split else self._fast
        if fast.encode_special_tokens is not split:  # another user of the tokenizer set it
            fast.encode_special_tokens = split
        # Of a batch: this method lets other threads run.
        (encoded,) = fast.encode_batch_fast([text], add_special_tokens=False)
        return encoded.ids

    def _piece_spans(self, text: str, *, start: bool) -> list[tuple[int, int]]:
        """The characters of each id of `_encode_piece`."""
        if self._line and not start:
            offsets = self._offsets(f"\n{text}")
            ids = self._tokenizer.encode(f"\n{text}", add_special_tokens=False, split_special_tokens=False)
            if ids[: len(self._line)] == self._line:
                return [(a - 1, b - 1) for a, b in offsets[len(self._line) :]]
        return self._offsets(text)

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        tokenizer: Any = self._tokenizer
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=False, return_offsets_mapping=True)
        return [(int(a), int(b)) for a, b in encoded["offset_mapping"]]


def _fast(tokenizer: Any) -> Any:
    """The tokenizer in Rust of a fast ``tokenizer``, in the state that whole texts are encoded in; None for others."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        fast.no_truncation()
        fast.no_padding()
    return fast
