"""Reads questions of several hops, and the passages around them, from MuSiQue, 2WikiMultihopQA and HotpotQA.

==================================================================  ====================================================
Files in a folder                                                   Format
==================================================================  ====================================================
``musique_ans_v1.0_train.jsonl``, ``musique_ans_v1.0_dev.jsonl``    MuSiQue's own (Trivedi et al., 2022)
``train.json``, ``dev.json``, ``id_aliases.json`` if present        2WikiMultihopQA's own (Ho et al., 2020)
``hotpot_train_v1.1.json``, ``hotpot_dev_distractor_v1.json``       HotpotQA's own (Yang et al., 2018)
``train.jsonl``, ``dev.jsonl``, ``corpus.jsonl``                    Questions with ``id``, ``question``, ``answer``, ``aliases``,
                                                                    ``type``, ``supporting_titles``; in MuSiQue ``steps``, in
                                                                    2Wiki ``evidence``. Passages with ``title`` and ``text``.
==================================================================  ====================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from examples.rag.corpus import Document

Part = Literal["train", "dev"]

_FILES: dict[Part, tuple[str, ...]] = {
    "train": ("train.jsonl", "musique_ans_v1.0_train.jsonl", "hotpot_train_v1.1.json", "train.json"),
    "dev": ("dev.jsonl", "musique_ans_v1.0_dev.jsonl", "hotpot_dev_distractor_v1.json", "dev.json"),
}
_COMPARISONS = ("comparison", "bridge_comparison")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, the titles of the passages that it needs, and its intermediate answers where they are known."""

    id: str
    text: str
    answers: tuple[str, ...]
    titles: tuple[str, ...]
    bridges: tuple[str, ...]
    comparison: bool


def questions(folder: Path, part: Part) -> list[Question]:
    """The answerable questions of a part. Raises ValueError if the folder has none of the files, or one that does not fit."""
    path = _file(folder, part)
    aliases = _aliases(folder)
    questions: list[Question] = []
    for index, item in enumerate(_read(path)):
        try:
            if item.get("answerable", True):
                questions.append(_question(item, aliases))
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path}, question {index + 1}: cannot be read: {error!r}") from error
    return questions


def passages(folder: Path) -> list[Document]:
    """The passages of a folder: ``corpus.jsonl``, or the passages of all questions in both parts, without repetitions."""
    corpus = folder / "corpus.jsonl"
    if corpus.is_file():
        texts = ((item["title"], item["text"]) for item in _read(corpus))
    else:
        files = [_file(folder, part) for part in _FILES]
        texts = (passage for path in files for item in _read(path) for passage in _context(item))
    return [Document(title=title, text=text) for title, text in dict.fromkeys(texts)]


def _question(item: dict[str, Any], aliases: dict[str, list[str]]) -> Question:
    if "paragraphs" in item:
        steps = item["question_decomposition"]
        titles = [item["paragraphs"][step["paragraph_support_idx"]]["title"] for step in steps]
        others, bridges = item.get("answer_aliases", []), [step["answer"] for step in steps[:-1]]
    elif "context" in item:
        titles = [title for title, _ in item["supporting_facts"]]
        others = aliases.get(item.get("answer_id") or "", [])
        bridges = [value for _, _, value in item.get("evidences", ())[:-1]]
    else:
        titles, others = item["supporting_titles"], item["aliases"]
        bridges = [step["answer"] for step in item.get("steps", ())[:-1]]
        bridges += [value for _, _, value in item.get("evidence", ())[:-1]]
    return Question(
        id=item["id"] if "id" in item else item["_id"],
        text=item["question"],
        answers=tuple(dict.fromkeys([item["answer"], *others])),
        titles=tuple(dict.fromkeys(titles)),
        bridges=tuple(bridges),
        comparison=item.get("type") in _COMPARISONS,
    )


def _context(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The passages that are listed with a question, as title and text."""
    for paragraph in item.get("paragraphs", ()):
        yield paragraph["title"], paragraph["paragraph_text"]
    for title, sentences in item.get("context", ()):
        yield title, " ".join(sentence.strip() for sentence in sentences)


def _aliases(folder: Path) -> dict[str, list[str]]:
    """Other names of answers, by ``answer_id``: 2WikiMultihopQA's ``id_aliases.json``, one JSON object per line."""
    path = folder / "id_aliases.json"
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines if line.strip()]
    return {item["Q_id"]: [*item["aliases"], *item.get("demonyms", ())] for item in items}


def _file(folder: Path, part: Part) -> Path:
    for name in _FILES[part]:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"found none of {', '.join(_FILES[part])} in {folder}; set `folders` to copies of the data sets")


def _read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]
