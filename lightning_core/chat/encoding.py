"""Encodes rendered text in parts, so quoted special tokens stay plain text, and decodes sampled tokens."""

from __future__ import annotations

import copy
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

from lightning_core.chat.cuts import Cuts
from lightning_core.chat.quoting import Quoting
from lightning_core.chat.templates.raw_template import Tokenizer
from lightning_core.content.packed_ids import PackedIds


class Encoder:
    """Encodes and decodes with ``tokenizer``. ``specials``: its special tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, quoting: Quoting, specials: Iterable[str]) -> None:
        self._fast = _fast_tokenizer(tokenizer)
        self._copies: dict[bool, Any] = {}
        """Copies of it with settings of their own, by whether special tokens are split."""
        self.lock: AbstractContextManager[Any] = threading.Lock() if self._fast is None else nullcontext()
        """Tokenizers in Python may change their own state. Fast ones do not here, so no text waits for another."""
        self.special_ids = {tokenizer.convert_tokens_to_ids(t) for t in specials}
        self._tokenizer = tokenizer
        self._quoting = quoting
        self._plain: dict[str, list[int]] = {}
        self._cuts = Cuts(self._fast)
        # SentencePiece adds a space before a text, so parts of a text are encoded after a line feed.
        self._line: list[int] = []
        x, line, line_x = (self.encode(t) for t in ("x", "\n", "\nx"))
        if line_x != line + x:
            self._line = line

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Ids of a rendered text. ``start``: it is the start of the prompt."""
        return list(chain.from_iterable(self._encode(text, start=start)))

    def encode_packed(self, text: str, *, start: bool = True) -> PackedIds:
        """As `encode`. Python's numbers of a long text are never all there."""
        packed = array("I")
        for ids in self._encode(text, start=start):
            packed.extend(ids)
        return PackedIds(packed)

    def _encode(self, text: str, *, start: bool) -> Iterator[Sequence[int]]:
        """The ids of the parts of ``text``."""
        with self.lock:
            for piece, quoted in self._quoting.pieces(text):
                for ids in (self._encode_plain(piece),) if quoted else self._encode_parts(piece, start=start):
                    yield ids
                    start = start and not ids

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
            if self._fast is not None:
                return self._fast.decode(token_ids, skip_special_tokens=skip)
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

    def _encode_piece(self, text: str, *, split: bool = False) -> list[int]:
        return list(chain.from_iterable(self._encode_parts(text, split=split, start=False)))

    def _encode_parts(self, text: str, *, split: bool = False, start: bool) -> Iterator[list[int]]:
        if self._line and not start:
            ids = self._ids(f"\n{text}", split=split)
            if ids[: len(self._line)] == self._line:
                yield ids[len(self._line) :]
                return
        for part in self._cuts.pieces(text):
            yield self._ids(part, split=split)

    def _ids(self, text: str, *, split: bool) -> list[int]:
        if self._fast is None:
            return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split)
        # Of a batch: this method lets other threads run.
        (encoded,) = self._unchanged(split).encode_batch_fast([text], add_special_tokens=False)
        return encoded.ids

    def _unchanged(self, split: bool) -> Any:
        """The fast tokenizer, or a copy: settings that others leave in the tokenizer, and ``split``, are state of its object.

        Nothing here changes that state, which other threads encode with at the same time.
        """
        fast: Any = self._fast
        if split or fast.encode_special_tokens or fast.padding is not None or fast.truncation is not None:
            if split not in self._copies:
                self._copies[split] = _copy(fast, split=split)
            fast = self._copies[split]
        return fast

    def _piece_spans(self, text: str, *, start: bool) -> list[tuple[int, int]]:
        """The characters of each id of `_encode_piece`."""
        if self._line and not start:
            offsets = self._offsets(f"\n{text}")
            ids = self._ids(f"\n{text}", split=False)
            if ids[: len(self._line)] == self._line:
                return [(a - 1, b - 1) for a, b in offsets[len(self._line) :]]
        return self._offsets(text)

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        if (
            self._fast is not None
        ):  # unlike transformers, which sets truncation and padding of the shared object before each text
            (fast,) = self._unchanged(False).encode_batch([text], add_special_tokens=False)
            return fast.offsets
        tokenizer: Any = self._tokenizer
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=False, return_offsets_mapping=True)
        return [(int(a), int(b)) for a, b in encoded["offset_mapping"]]


def _fast_tokenizer(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` in ``tokenizer``, if transformers adds nothing but time to its results; else None."""
    kind = type(tokenizer)
    methods = [
        getattr(kind, name, None) for name in ("encode", "_encode_plus", "decode", "_decode", "backend_tokenizer")
    ]
    functions = [getattr(method, "fget", method) for method in methods]
    plain = all(getattr(f, "__module__", "").startswith("transformers.tokenization_utils") for f in functions)
    return tokenizer.backend_tokenizer if plain else None


def _copy(fast: Any, *, split: bool) -> Any:
    """``fast`` with the settings that whole texts are encoded with."""
    copied = copy.deepcopy(fast)
    copied.no_truncation()
    copied.no_padding()
    copied.encode_special_tokens = split
    return copied
