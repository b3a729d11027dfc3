"""Reads word problems written by people: MAWPS and ASDiv-A with SVAMP, or GSM8K.

Set the folder of a copy; its files are recognised by their names and fields::

    tasks:
      train: {source: "examples.math_tool.word_problems:train", args: {folder: data/svamp, operations: 1}}
      eval: {source: "examples.math_tool.word_problems:validation", args: {folder: data/svamp, operations: 1}}

==========================  ==============================================================================================
File                        Fields
==========================  ==============================================================================================
``train|test.jsonl``        ``question``, ``answer``: GSM8K's own, whose ``answer`` is a solution that ends with ``#### 72``;
                            or a number, with ``operations`` or ``solution``, and ``id``
``train.csv``, ``dev.csv``  ``Question`` with ``number0``, ``Numbers``, ``Equation``, ``Answer``: those in
                            ``data/mawps-asdiv-a_svamp`` of SVAMP's repository, whose ``dev.csv`` is SVAMP
``SVAMP.json``              ``ID``, ``Body``, ``Question``, ``Equation``, ``Answer``
==========================  ==============================================================================================
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from examples.math_tool.agent import EXAMPLES, Shown, parse_answer
from examples.math_tool.tasks import Task

TOLERANCE = 1e-3
"""The largest difference of a correct answer: some answers are rounded to four decimals."""
VALIDATION_SHARE = 10
"""About one of this many training problems is set aside for validation."""

_FILES = {"train": ("train.jsonl", "train.csv"), "test": ("test.jsonl", "dev.csv", "SVAMP.json")}
_ANNOTATION = re.compile(r"<<([^=<>]*)=[^<>]*>>")
_OPERATOR = re.compile(r"(?<=[\d.)%])\s*[-+*/]")
"""An operator between two values in an annotation such as ``<<(3+42)/5=9>>``, without signs."""
_WORD_OPERATOR = re.compile(r"(?<!\S)[-+*/](?!\S)")
"""An operator in an equation whose symbols are separated by blanks, infix or prefix."""


def train(folder: str, *, operations: int | None = None, examples: Shown = "one-operation") -> list[Task]:
    """Training problems, in a fixed random order.

    ``operations``: only problems with this number of operations in their solution or equation; None: all. ``examples``: the solved
    problems in the prompt. Raises ValueError for a folder without the files, or with one that cannot be read.
    """
    return _tasks(folder, "train", operations, examples)


def validation(folder: str, *, operations: int | None = None, examples: Shown = "one-operation") -> list[Task]:
    """Problems of the training set that are set aside for tuning. Arguments as in `train`."""
    return _tasks(folder, "validation", operations, examples)


def test(folder: str, *, operations: int | None = None, examples: Shown = "one-operation") -> list[Task]:
    """SVAMP, or GSM8K's test set, for the final measurement. Arguments as in `train`."""
    return _tasks(folder, "test", operations, examples)


def is_validation(question: str) -> bool:
    """Whether a training problem is set aside. Depends on its letters only: variants in other numbers stay together."""
    return _digest(re.sub(r"[^a-z]", "", question.lower()))[0] % VALIDATION_SHARE == 0


Split = Literal["train", "validation", "test"]


def _tasks(folder: str, split: Split, operations: int | None, examples: Shown) -> list[Task]:
    if examples not in EXAMPLES:
        raise ValueError(f"examples: found {examples!r}, expected one of {', '.join(EXAMPLES)}")
    tasks: dict[str, Task] = {}
    for item in _problems(Path(folder), "test" if split == "test" else "train"):
        if split != "test" and is_validation(item["question"]) != (split == "validation"):
            continue
        if operations in (None, item["operations"]):
            tasks.setdefault(item["question"], {**item, "split": split, "tolerance": TOLERANCE, "examples": examples})
    return sorted(tasks.values(), key=lambda task: _digest(task["question"]))


def _problems(folder: Path, part: Literal["train", "test"]) -> Iterator[Task]:
    """``id``, ``question``, ``answer`` and ``operations`` of each problem."""
    path = next((folder / name for name in _FILES[part] if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"found none of {', '.join(_FILES[part])} in {folder}; set `folder` to a copy of the data set")
    for index, item in enumerate(_items(path)):
        try:
            question, answer, operations = _parse(item)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}, problem {index + 1}: cannot be read: {error!r}") from error
        identity = item.get("id", item.get("ID", f"{part}-{index:04d}"))
        yield {"id": identity, "question": question, "answer": answer, "operations": operations}


def _items(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as lines:
        match path.suffix:
            case ".csv":
                return list(csv.DictReader(lines))
            case ".json":
                return json.load(lines)
            case _:
                return [json.loads(line) for line in lines if line.strip()]


def _parse(item: dict[str, Any]) -> tuple[str, float, int]:
    """Question, answer and number of operations."""
    if "Numbers" in item:
        numbers = item["Numbers"].split()
        text = re.sub(r"number(\d+)", lambda found: numbers[int(found[1])], item["Question"])
        return _joined(text), _number(item["Answer"]), len(_WORD_OPERATOR.findall(item["Equation"]))
    if "Body" in item:
        body = item["Body"].strip()
        text = f"{body}{'' if body.endswith(('.', '?', '!', ',')) else ','} {item['Question'].strip()}"
        return _joined(text), _number(item["Answer"]), len(_WORD_OPERATOR.findall(item["Equation"]))
    answer = str(item["answer"])
    solution = item.get("solution", answer)
    operations = item["operations"] if "operations" in item else _annotated(solution)
    return item["question"], _number(answer.rpartition("####")[2]), operations


def _annotated(solution: str) -> int:
    return sum(len(_OPERATOR.findall(expression)) for expression in _ANNOTATION.findall(solution))


def _number(text: Any) -> float:
    number = parse_answer(str(text))
    if number is None:
        raise ValueError(f"the answer {text!r} is not a number")
    return number


def _joined(text: str) -> str:
    """``text`` without the blanks that separate its tokens from punctuation."""
    text = re.sub(r"\s+([.,?!;:%]|n't|'s)", r"\1", " ".join(text.split()))
    return text.replace("$ ", "$")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
