"""Cuts long texts where their tokens are the same as those of the whole.

The places are between an ASCII letter and a space. At such a place a tokenizer of the usual kind always begins a new word, in
any text: words are what its expressions match, none of these matches goes on from a letter to a space, and no expression looks back. Each
word then becomes tokens by itself. Tokenizers with other parts, such as those that have words with spaces in them, get the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_PIECE = 1 << 14
"""Characters. Python's numbers of their tokens are made, and freed, in a fraction of a millisecond."""
_INSIDE = re.compile("[A-Za-z] ")

_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_KNOWN = frozenset({
    # words
    r" ?\p{L}+", rf"{_BEFORE}\p{{L}}+", rf"{_BEFORE}[\p{{L}}\p{{M}}]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    *(f"{_BEFORE}{word}{ending}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*") for ending in ("", f"{_ENDING}?")),
    # the ends of English words
    _ENDING, "'(?i:[sdmt]|ll|ve|re)", "'(?:[sdmt]|ll|ve|re)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d",
    # numbers, other characters and white space
    r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+",
    *(rf" ?[^\s\p{{L}}{marks}\p{{N}}]+{end}" for marks in ("", r"\p{M}") for end in ("", r"[\r\n]*", r"[\r\n/]*")),
    r" ?[\p{P}\p{S}]+[\r\n]*", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+",
})  # fmt: skip
"""Alternatives of the expressions of tokenizers, in none of whose matches a space follows a letter."""
_KEPT = (("Isolated", False), ("Removed", True))
"""The behavior of an expression, and whether it is inverted, if its matches are words."""


class Cuts:
    """The places where texts for ``fast``, a `tokenizers.Tokenizer`, may be cut; ``fast`` is not changed later."""

    def __init__(self, fast: Any) -> None:
        self._allowed = fast is not None and _are_allowed(fast)

    def pieces(self, text: str) -> Iterator[str]:
        """The parts of ``text`` in order, whose tokens one after the other are those of ``text``."""
        start = 0
        while self._allowed and len(text) - start > _PIECE:
            end = _place(text, start + _PIECE)
            yield text[start:end]
            start = end
        if start < len(text) or not text:
            yield text[start:]


def _place(text: str, at: int) -> int:
    """The first place after ``at``, or the end. To look for spaces takes almost no time where there are none."""
    while (at := text.find(" ", at + 1)) >= 0:
        if _is_letter(text[at - 1]):
            return at
    return len(text)


def _is_letter(character: str) -> bool:
    return character.isascii() and character.isalpha()


def _are_allowed(fast: Any) -> bool:
    normalizer, words = (_settings(part) for part in (fast.normalizer, fast.pre_tokenizer))
    return (
        normalizer.get("type") in (None, "NFC")
        and _are_words(words)
        and _begins_words(fast.pre_tokenizer)
        and getattr(fast.model, "dropout", None) is None
        and not any(_crosses(token) for token in fast.get_added_tokens_decoder().values())
    )


def _settings(part: Any) -> Mapping[str, Any]:
    """What a part of a tokenizer is made from; without a type for one that is written in Python."""
    try:
        return {} if part is None else json.loads(part.__getstate__())
    except Exception as error:  # noqa: BLE001 - tokenizers raises no other
        return {"type": repr(error)}


def _are_words(settings: Mapping[str, Any], *, last: bool = True) -> bool:
    """Whether no match goes on from a letter to a space, and the text is as it was sent before each but the last part."""
    match settings:
        case {"type": "Sequence", "pretokenizers": [*parts]}:
            ends = [last and part is parts[-1] for part in parts]
            return all(_are_words(part, last=end) for part, end in zip(parts, ends, strict=True))
        case {"type": "ByteLevel"}:
            return last
        case {"type": "Digits"}:
            return True
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": behavior, "invert": invert}:
            return (behavior, invert) in _KEPT and _KNOWN.issuperset(_alternatives(pattern))
        case _:
            return False


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of ``pattern``, without those in its groups."""
    found, depth, escaped, in_class = [""], 0, False, False
    for character in pattern:
        if not escaped and not in_class:
            depth += (character == "(") - (character == ")")
        if character == "|" and not (depth or escaped or in_class):
            found.append("")
            continue
        found[-1] += character
        in_class = in_class if escaped else character == "[" or (in_class and character != "]")
        escaped = character == "\\" and not escaped
    return found


def _begins_words(splitter: Any) -> bool:
    """Whether each place begins a word: what no expression matches is one word, with the spaces in it."""
    return all(any(start == 1 for _, (start, _) in splitter.pre_tokenize_str(text)) for text in ("a a", "A A"))


def _crosses(token: Any) -> bool:
    """Whether an added token may have characters, or depend on them, on both sides of a place."""
    text = token.content
    reaches = (token.rstrip and _is_letter(text[-1:])) or (token.single_word and text[:1] == " ")
    return reaches or _INSIDE.search(text) is not None
