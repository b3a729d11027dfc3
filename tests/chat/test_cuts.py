"""Long texts become the same tokens in pieces as at once, and no step of rendering one takes long by itself."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from lightning_core.chat import cuts
from lightning_core.chat.cuts import Cuts
from lightning_core.chat.encoding import Encoder
from lightning_core.chat.quoting import Quoting
from lightning_core.content.packing import write

GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SMALL_FIRST = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|\s+"
CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\s+(?!\S)"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PARTS = ("a", "b", "Z", "é", "中", "1", "22", " ", "  ", "\n", "\r\n", "\t", "'s", "…", "!", "\xa0", "\u0301", "The quick",
         " brown", "\U0001f916", "ſ", "ab")  # fmt: skip


def tokenizer(words: Any, normalizer: Any = None, *added: AddedToken) -> Any:
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = words
    made.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the quick brown fox ab Za  a\n b's 22 1"] * 9, trainer)
    made.add_tokens(list(added))
    return made


def expression(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert), BYTES])


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "_PIECE", 5)


def ids(fast: Any, text: str) -> list[int]:
    return fast.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "fast",
    [
        tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False)),
        tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True), normalizers.NFC()),
        tokenizer(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()])),
        tokenizer(expression(GPT4)),
        tokenizer(expression(GPT4, "removed", True), normalizers.NFC()),
        tokenizer(expression(f"{SMALL_FIRST}|{CAPITALS}")),
        tokenizer(pre_tokenizers.ByteLevel(), None, AddedToken("ab", lstrip=True), AddedToken("The", single_word=True)),
    ],
)
def test_the_tokens_of_pieces_are_those_of_the_whole(fast: Any):
    random, places, cut = Random(0), Cuts(fast), 0
    for _ in range(500):
        text = "".join(random.choices(PARTS, k=random.randint(0, 30)))
        pieces = list(places.pieces(text))
        cut += len(pieces) > 1
        assert "".join(pieces) == text
        assert [token for piece in pieces for token in ids(fast, piece)] == ids(fast, text)
    assert cut > 100


@pytest.mark.parametrize(
    "fast",
    [
        tokenizer(BYTES),
        tokenizer(pre_tokenizers.Metaspace()),
        tokenizer(expression(CAPITALS)),
        tokenizer(expression(r"\p{L}+ \p{L}+|\s+")),
        tokenizer(expression(r"(?<=b)\s+|\p{L}+|\s+")),
        tokenizer(pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(), pre_tokenizers.Digits()])),
        tokenizer(pre_tokenizers.ByteLevel(), normalizers.Replace(" ", "_")),
        tokenizer(pre_tokenizers.ByteLevel(), None, AddedToken("a b")),
        tokenizer(pre_tokenizers.ByteLevel(), None, AddedToken("ab", rstrip=True)),
        None,
    ],
)
def test_other_tokenizers_get_the_whole_text(fast: Any):
    text = "the quick brown fox " * 9
    assert list(Cuts(fast).pieces(text)) == [text]


def test_json_in_pieces_is_that_of_the_whole():
    long = 'é"\\\n\x00\x7f\ud83d\ude00\U0001f916 ' * 9000
    content = [{"type": "text", "text": long}, {"b": long, "a": {"c": [1, None, True, 0.5, long, {1: long}]}}]
    for value in (long, {"role": "user", "content": long}, {"role": "user", "content": content}, ["x", long, {}, []]):
        for ascii_only in (False, True):
            encoder = json.JSONEncoder(ensure_ascii=ascii_only)
            assert write(value, encoder) == json.dumps(value, ensure_ascii=ascii_only)
    assert write({"b": long, "a": 1}, json.JSONEncoder(sort_keys=True)) == json.dumps(
        {"b": long, "a": 1}, sort_keys=True
    )


def test_a_long_prompt_is_encoded_in_pieces():
    from transformers import PreTrainedTokenizerFast

    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False)))
    encoder, prompt = Encoder(wrapped, Quoting(["<end>"]), []), "the quick brown fox " * 100
    longest = 0
    inner = encoder._ids  # pyright: ignore[reportPrivateUsage]

    def watched(text: str, *, split: bool) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return inner(text, split=split)

    encoder._ids = watched  # pyright: ignore[reportPrivateUsage]
    packed = encoder.encode_packed(prompt)
    assert longest < 20
    assert packed == encoder.encode(prompt) == ids(wrapped.backend_tokenizer, prompt)


@pytest.mark.parametrize("before", [*range((1 << 15) - 6, (1 << 15) + 2), 3 << 15])
def test_tokens_at_the_ends_of_pieces_are_quoted(before: int):
    quoting = Quoting(["<end>", "<"])
    quoted = quoting.quote("x" * before + "<end>" + "y" * before)
    assert "<" not in quoted
    assert "".join(piece for piece, _ in quoting.pieces(quoted)) == "x" * before + "<end>" + "y" * before
    assert list(quoting.pieces("")) == []
