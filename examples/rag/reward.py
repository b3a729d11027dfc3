"""The reward of an answer: token-level F1 as in SQuAD and MuSiQue, plus a format term."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> list[str]:
    """The words of ``text`` in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(answer: str, gold: str) -> float:
    """The harmonic mean of precision and recall of the answer's words."""
    words, wanted = normalize(answer), normalize(gold)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


def best_f1(answer: str, golds: Sequence[str]) -> float:
    """The best F1 against any of the accepted answers."""
    return max(f1(answer, gold) for gold in golds)


def score(answer: str, golds: Sequence[str], *, well_formed: bool) -> float:
    """0.9 · the best F1 against any of the accepted answers + 0.1 if well-formed."""
    return 0.9 * best_f1(answer, golds) + 0.1 * well_formed
