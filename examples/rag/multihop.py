"""Questions of several hops that people wrote or templates made over Wikipedia, and the search in all their passages.

Set the folders of your copies of MuSiQue, 2WikiMultihopQA or HotpotQA; see `multihop_formats`. Their questions are mixed, and their
passages are one corpus::

    tasks:
      train: {source: "examples.rag.multihop:train", args: {folders: [data/musique, data/2wiki], subset: two-search}}
      eval: {source: "examples.rag.multihop:validation", args: {folders: [data/musique, data/2wiki], subset: two-search}}
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from examples.rag.corpus import Document
from examples.rag.multihop_formats import Question, passages, questions
from examples.rag.retrieval import Index
from examples.rag.reward import normalize
from examples.rag.tasks import Task

Subset = Literal["all", "two-search"]
Split = Literal["train", "validation", "test"]

VALIDATION_SHARE = 3
"""About one of this many training questions is set aside for validation."""
ANSWER_WORDS = 5
"""The most words of an answer in ``two-search``."""
PASSAGE_WORDS = 50
"""The words of a passage that a search shows."""
TITLE_WEIGHT = 3
"""How often the words of a title count in a search."""

_QUALIFIER = re.compile(r"\s*\([^()]*\)$")


def train(folders: Sequence[str], *, subset: Subset = "all") -> list[Task]:
    """Training questions, in an order that mixes the data sets.

    ``subset``: ``two-search`` keeps the questions that two searches answer and one does not; see `is_two_search`. Raises ValueError
    for a folder without the files.
    """
    return _tasks(folders, "train", subset)


def validation(folders: Sequence[str], *, subset: Subset = "all") -> list[Task]:
    """Questions of the training sets that are set aside for tuning. Arguments as in `train`."""
    return _tasks(folders, "validation", subset)


def test(folders: Sequence[str], *, subset: Subset = "all") -> list[Task]:
    """The questions of the development sets, for the final measurement. Arguments as in `train`."""
    return _tasks(folders, "test", subset)


def search(folders: Sequence[str], query: str) -> str:
    """The title and the first words of the passage that matches best, among all passages of ``folders``."""
    found = _index(tuple(folders)).search(query)
    return f"{found[0].title}: {' '.join(found[0].text.split()[:PASSAGE_WORDS])}" if found else "Nothing found."


def is_two_search(question: Question, folders: Sequence[str]) -> bool:
    """Whether the second of two searches shows the answer, and no single one does, as far as the data set tells.

    The question needs two passages, is not a comparison, and its answer has at most `ANSWER_WORDS` words. A search for the title of
    one passage shows the title of the other or the intermediate answer; a search for the other title shows the answer; neither the
    first search nor one for the question itself does.
    """
    if question.comparison or len(question.titles) != 2 or len(question.answers[0].split()) > ANSWER_WORDS:
        return False
    titles = [_QUALIFIER.sub("", title) for title in question.titles]
    if question.answers[0].lower() in ("yes", "no") or _shows(search(folders, question.text), question.answers):
        return False
    return any(
        _shows(search(folders, second), question.answers)
        and not _shows(first_found, question.answers)
        and _shows(first_found, (*question.bridges, second))
        for first, second in itertools.permutations(titles)
        for first_found in [search(folders, first)]
    )


def is_validation(identity: str) -> bool:
    """Whether a training question is set aside. Depends on its id only."""
    return _digest(identity)[0] % VALIDATION_SHARE == 0


def _tasks(folders: Sequence[str], split: Split, subset: Subset) -> list[Task]:
    if subset not in ("all", "two-search"):
        raise ValueError(f"subset: found {subset!r}, expected 'all' or 'two-search'")
    tasks: list[Task] = []
    for folder in folders:
        for question in questions(Path(folder), "dev" if split == "test" else "train"):
            if split != "test" and is_validation(question.id) != (split == "validation"):
                continue
            if subset == "all" or is_two_search(question, folders):
                tasks.append(_task(question, folders, split, Path(folder).name))
    return sorted(tasks, key=lambda task: _digest(task["id"]))


def _task(question: Question, folders: Sequence[str], split: Split, form: str) -> Task:
    return {
        "id": question.id,
        "split": f"{split}, {form}",
        "form": form,
        "hops": len(question.titles),
        "turns": max(len(question.titles), 2) + 1,
        "question": question.text,
        "answers": list(question.answers),
        "folders": list(folders),
    }


def _shows(text: str, phrases: Sequence[str]) -> bool:
    words = f" {' '.join(normalize(text))} "
    return any(f" {' '.join(normalize(phrase))} " in words for phrase in phrases if normalize(phrase))


@lru_cache(maxsize=2)
def _index(folders: tuple[str, ...]) -> Index:
    documents: list[Document] = []
    for folder in folders:
        documents += passages(Path(folder))
    return Index(list(dict.fromkeys(documents)), title_weight=TITLE_WEIGHT)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
