"""BM25 search over the titles and texts of a corpus."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import bm25s
import numpy

from examples.rag.corpus import Document

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it logs its progress


class Index:
    """A searchable corpus. Words of a title count ``title_weight`` times. Thread-safe."""

    def __init__(self, documents: Sequence[Document], *, title_weight: int = 1) -> None:
        self._documents = documents
        self._index = bm25s.BM25()
        texts = [f"{f'{document.title} ' * title_weight}{document.text}" for document in documents]
        self._index.index(_words(texts), show_progress=False)

    def search(self, query: str, count: int = 1) -> list[Document]:
        """The ``count`` best matches, best first; fewer if fewer share a word with the query."""
        words = _words([query])[0]
        if not words:
            return []
        scores = self._index.get_scores(words)
        best = numpy.argsort(-scores, kind="stable")[:count]
        return [self._documents[index] for index in best if scores[index] > 0]


def _words(texts: list[str]) -> list[list[str]]:
    return cast(list[list[str]], bm25s.tokenize(texts, return_ids=False, show_progress=False))
