"""Streamed text of a response is the same as the text decoded at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from lightning_core.backends.scripted import ByteTokenizer
from lightning_core.endpoint.streaming import HeldText, RunningText, StopSearch, cut

Decode = Callable[[list[int]], str]

BYTES: Decode = partial(ByteTokenizer().decode, skip_special_tokens=True)
ANY_BYTE = [[token] for token in range(258)]

PIECES = ["▁", "▁the", "▁cat", "s", "é"]
LETTERS = ["ä".encode(), "水".encode()]
FALLBACK = [f"<0x{byte:02X}>" for letter in LETTERS for byte in letter]


def pieces_with_spaces() -> Decode:
    """Like SentencePiece: a token includes its space, and the first space is omitted; other letters are bytes."""
    vocabulary = {piece: i for i, piece in enumerate([*PIECES, *FALLBACK])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    return tokenizer.decode


# Whole letters only: this decoder drops a run of bytes with one too many, including a valid start.
PIECE_OR_LETTER = [*([token] for token in range(len(PIECES))), [5, 6], [7, 8, 9]]


@pytest.mark.parametrize(("decode", "units"), [(BYTES, ANY_BYTE), (pieces_with_spaces(), PIECE_OR_LETTER)])
@given(data=st.data())
def test_a_response_read_piece_by_piece_becomes_what_it_is_as_a_whole(
    decode: Decode, units: list[list[int]], data: st.DataObject
):
    ids = [token for unit in data.draw(st.lists(st.sampled_from(units), max_size=30)) for token in unit]
    ends = sorted(data.draw(st.sets(st.integers(1, len(ids)))) | {len(ids)}) if ids else []
    running = RunningText(decode)
    for end in ends:
        assert decode(ids).startswith(running(ids[:end]).rstrip("\ufffd"))
    assert running(ids) == decode(ids)


def test_a_long_response_is_decoded_once():
    decode, decoded = counted_bytes()
    running = RunningText(decode)
    ids = list("ä long answer, token by token ".encode() * 100)
    for end in range(1, len(ids) + 1):
        running(ids[:end])
    assert running(ids) == bytes(ids).decode()
    assert len(decoded) < 5 * len(ids)


def counted_bytes() -> tuple[Decode, list[int]]:
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.extend(ids)
        return bytes(ids).decode(errors="replace")

    return decode, decoded


@pytest.mark.parametrize("unit", [b"\xff", b"\xff\xffa", "水".encode()[:2], b"\x80" * 40 + "水".encode()])
def test_tokens_that_form_no_character_are_decoded_in_linear_time(unit: bytes):
    decode, decoded = counted_bytes()
    running = RunningText(decode)
    ids = list(unit * (4000 // len(unit)))
    for end in range(1, len(ids) + 1):
        assert bytes(ids).decode(errors="replace").startswith(running(ids[:end]).rstrip("\ufffd"))
    assert len(decoded) < 40 * len(ids)
    assert running([*ids, *b" end"]) == bytes([*ids, *b" end"]).decode(errors="replace")


class Counted(str):
    """Text that counts the characters that are searched in it."""

    searched = 0

    def __radd__(self, before: str) -> Counted:
        return Counted(str(before) + str(self))

    def __add__(self, after: str) -> Counted:
        return Counted(str(self) + str(after))

    def __getitem__(self, place: Any) -> Counted:
        return Counted(str(self)[place])

    def find(self, mark: str, start: int = 0) -> int:  # type: ignore[override]
        Counted.searched += len(self) - start
        return str(self).find(mark, start)


STOPS = ("never", "\n\n\n", "aab", "水b", "b水水")


@given(st.text("ab水\n", max_size=40), st.lists(st.sampled_from(STOPS), unique=True).map(tuple), st.booleans())
def test_a_stop_string_is_found_with_the_token_that_completes_it(text: str, stops: tuple[str, ...], whole: bool):
    units = [list(letter.encode()) for letter in text]
    ids = [token for unit in units for token in unit]
    steps = [sum(map(len, units[: i + 1])) for i in range(len(units))] if whole else range(1, len(ids) + 1)
    decode = counted_bytes()[0]
    search = StopSearch(decode, stops)
    for end in steps:
        found = search(ids[:end])
        assert found == any(stop in decode(ids[:end]) for stop in stops)
        if found:
            break


def test_only_new_text_is_searched_for_stop_strings():
    Counted.searched = 0
    stops = tuple(f"stop {i:02}" for i in range(64))
    ids = list(b"an answer, token by token " * 200)
    search = StopSearch(lambda ids: Counted(bytes(ids).decode()), stops)
    assert not any(search(ids[:end]) for end in range(1, len(ids) + 1))
    assert 0 < Counted.searched < len(ids) * len(stops) * 10


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=5))
def test_text_that_may_become_a_stop_string_is_held_back(text: str, stops: list[str]):
    held = HeldText(RunningText(lambda ids: bytes(ids).decode()), lambda text: ("", text), tuple(stops), tools=None)
    kept, _ = cut(text, tuple(stops))
    ids, sent = list(text.encode()), ""
    for end in range(1, len(ids) + 1):
        sent += held.more(ids[:end])[1]
        begins = [n for n in range(end) if any(stop.startswith(text[n:end]) for stop in stops)]
        at = text[:end].find
        found = [at(stop) for stop in stops if at(stop) >= 0]
        if found:
            break
        assert sent == text[: min(begins, default=end)]
    assert kept.startswith(sent)
    assert sent + held.rest({"content": kept})[1] == kept
