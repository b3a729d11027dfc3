"""Reads MuSiQue's ``.jsonl`` files. Each question is searched in its own paragraphs.

Set the files in the configuration::

    tasks:
      train: {source: "examples.rag.musique:load", args: {path: data/musique_ans_v1.0_train.jsonl}}
      eval: {source: "examples.rag.musique:load", args: {path: data/musique_ans_v1.0_dev.jsonl}}

Paragraphs have about 100 words and questions up to four hops. They require a larger model than the demo's, and about
``policy.max_context: 4096`` and ``rollouts.max_tokens: 64``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.rag.tasks import Task


def load(path: str) -> list[Task]:
    """The answerable questions of a file."""
    with Path(path).open(encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines if line.strip()]
    return [_task(item) for item in items if item.get("answerable", True)]


def _task(item: dict[str, Any]) -> Task:
    hops = len(item.get("question_decomposition", ())) or 2
    return {
        "id": item["id"],
        "split": f"{hops} hops",
        "form": "musique",
        "hops": hops,
        "turns": hops + 1,
        "question": item["question"],
        "answers": [item["answer"], *item.get("answer_aliases", ())],
        "paragraphs": [[paragraph["title"], paragraph["paragraph_text"]] for paragraph in item["paragraphs"]],
    }
