"""Streamed text of a response is the same as the text decoded at the end."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from lightning_core.backends.scripted import ByteTokenizer
from lightning_core.endpoint.streaming import RunningText

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
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.extend(ids)
        return bytes(ids).decode(errors="replace")

    running = RunningText(decode)
    ids = list("ä long answer, token by token ".encode() * 100)
    for end in range(1, len(ids) + 1):
        running(ids[:end])
    assert running(ids) == bytes(ids).decode()
    assert len(decoded) < 5 * len(ids)
