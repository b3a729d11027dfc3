"""Questions of several hops that people wrote or templates made over Wikipedia, and the search in all their passages.

Set the folders of your copies of MuSiQue, 2WikiMultihopQA or HotpotQA; see `multihop_formats`. Their questions are mixed, and their
passages are one corpus::

    tasks:
      train: {source: "examples.rag.multihop:train", args: {folders: [data/musique, data/2wiki], subset: two-search}}
      eval: {source: "examples.rag.multihop:validation", args: {folders: [data/musique, data/2wiki], subset: two-search}}

==============  ========================================================================================================
``subset``      Questions
==============  ========================================================================================================
``all``         all
``two-search``  those that two searches answer and one does not; see `two_searches`
``bridge``      others whose answer a search shows, without comparisons and answers of yes or no: for demonstrations
==============  ========================================================================================================
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from examples.rag.corpus import Document
from examples.rag.multihop_formats import Question, passages, questions
from examples.rag.retrieval import Index
from examples.rag.reward import normalize
from examples.rag.tasks import Task

Subset = Literal["all", "two-search", "bridge"]
Split = Literal["train", "validation", "test"]

VALIDATION_SHARE = 3
"""About one of this many training questions is set aside for validation."""
ANSWER_WORDS = 5
"""The most words of an answer in ``two-search``."""
PASSAGE_WORDS = 50
"""The words of a passage that a search shows."""
TITLE_WEIGHT = 3
"""The weight of the words of a title in a search."""

_QUALIFIER = re.compile(r"\s*\([^()]*\)$")


def train(folders: Sequence[str], *, subset: Subset = "all", examples: bool = True) -> list[Task]:
    """Training questions, in an order that mixes the data sets.

    ``examples``: whether the prompt has solved questions; without them it is for a model that was fine-tuned on the task. Raises
    ValueError for a folder without the files, or another subset.
    """
    return _tasks(folders, "train", subset, examples)


def validation(folders: Sequence[str], *, subset: Subset = "all", examples: bool = True) -> list[Task]:
    """Questions of the training sets that are set aside for tuning. Arguments as in `train`."""
    return _tasks(folders, "validation", subset, examples)


def test(folders: Sequence[str], *, subset: Subset = "all", examples: bool = True) -> list[Task]:
    """The questions of the development sets, for the final measurement. Arguments as in `train`."""
    return _tasks(folders, "test", subset, examples)


def gold_response(task: Mapping[str, Any], prompt: str) -> str:
    """A search for the next title, and at the end the answer, for `examples.demonstrations`."""
    done = prompt.rpartition(task["question"])[2].count("<|im_start|>assistant\nSearch: ")
    return f"Search: {task['searches'][done]}" if done < len(task["searches"]) else f"Answer: {task['answers'][0]}"


def search(folders: Sequence[str], query: str) -> str:
    """The title and the first words of the passage that matches best, among all passages of ``folders``."""
    hits = _index(tuple(folders)).search(query)
    return f"{hits[0].title}: {' '.join(hits[0].text.split()[:PASSAGE_WORDS])}" if hits else "Nothing found."


def two_searches(question: Question, folders: Sequence[str]) -> list[str] | None:
    """The two searches that answer a question, in order; None if the subset ``two-search`` does not have it.

    As far as the data set tells, the second search shows the answer and no single one does. The question needs two passages, is not a
    comparison, and its answer has at most `ANSWER_WORDS` words. A search for the title of one passage shows the title of the other or
    the intermediate answer; a search for the other title shows the answer; neither the first search nor one for the question itself
    does.
    """
    if not _is_bridge(question) or len(question.titles) != 2 or len(question.answers[0].split()) > ANSWER_WORDS:
        return None
    if _shows(search(folders, question.text), question.answers):
        return None
    for first, second in itertools.permutations(_without_qualifiers(question.titles)):
        hits = search(folders, first)
        if (
            _shows(search(folders, second), question.answers)
            and not _shows(hits, question.answers)
            and _shows(hits, (*question.bridges, second))
        ):
            return [first, second]
    return None


def is_validation(identity: str) -> bool:
    """Whether a training question is set aside. Depends on its id only."""
    return _digest(identity)[0] % VALIDATION_SHARE == 0


def _tasks(folders: Sequence[str], split: Split, subset: Subset, examples: bool) -> list[Task]:
    if subset not in get_args(Subset):
        raise ValueError(f"subset: found {subset!r}, expected one of {', '.join(get_args(Subset))}")
    if isinstance(folders, str):
        raise ValueError(f"folders: found the text {folders!r}, expected a list of folders")
    tasks: list[Task] = []
    for folder in folders:
        for question in questions(Path(folder), "dev" if split == "test" else "train"):
            if split != "test" and is_validation(question.id) != (split == "validation"):
                continue
            searches = _searches(question, folders, subset)
            if searches is not None:
                tasks.append(
                    {
                        "id": question.id,
                        "split": f"{split}, {Path(folder).name}",
                        "form": Path(folder).name,
                        "hops": len(question.titles),
                        "turns": max(len(question.titles), 2) + 1,
                        "question": question.text,
                        "answers": list(question.answers),
                        "searches": searches,
                        "examples": examples,
                        "folders": list(folders),
                    }
                )
    return sorted(tasks, key=lambda task: _digest(task["id"]))


def _searches(question: Question, folders: Sequence[str], subset: Subset) -> list[str] | None:
    """The titles to search, in order; None if the question is not in ``subset``.

    If two searches do not answer the question, or for ``all``, which is read without an index, titles in the question are first.
    """
    two = two_searches(question, folders) if subset != "all" else None
    if subset == "two-search":
        return two
    if subset == "bridge" and (two or not _is_bridge(question)):
        return None
    titles = dict.fromkeys(_without_qualifiers(question.titles))
    if subset == "bridge" and not any(_shows(search(folders, title), question.answers) for title in titles):
        return None
    return sorted(titles, key=lambda title: title.lower() not in question.text.lower())


def _is_bridge(question: Question) -> bool:
    return not question.comparison and question.answers[0].lower() not in ("yes", "no")


def _without_qualifiers(titles: Sequence[str]) -> list[str]:
    return [_QUALIFIER.sub("", title) for title in titles]


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
