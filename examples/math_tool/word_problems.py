"""Reads word problems written by people: MAWPS and ASDiv-A with SVAMP, or GSM8K.

Set the folder of a copy; its files are recognized by their names and fields::

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from examples.math_tool.agent import EXAMPLES, Shown, parse_answer, user_message
from examples.math_tool.tasks import Task
from lightning_core.testing import tool_call

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


def gold_response(task: Mapping[str, Any], prompt: str) -> str:
    """The next calculation, and at the end the answer, for `examples.demonstrations`."""
    done = prompt.rpartition(user_message(task["question"]))[2].count("<tool_call>")
    if done < len(task["expressions"]):
        return tool_call("calculator", expression=task["expressions"][done])
    return f"{task['answer']:.4f}".rstrip("0").rstrip(".")


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
    """``id``, ``question``, ``answer``, ``operations`` and ``expressions`` of each problem."""
    path = next((folder / name for name in _FILES[part] if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"found none of {', '.join(_FILES[part])} in {folder}; set `folder` to a copy of the data set")
    for index, item in enumerate(_items(path)):
        try:
            question, answer, operations, expressions = _parse(item)
        except (LookupError, ValueError, StopIteration) as error:
            raise ValueError(f"{path}, problem {index + 1}: cannot be read: {error!r}") from error
        identity = item.get("id", item.get("ID", f"{part}-{index:04d}"))
        yield {
            "id": identity,
            "question": question,
            "answer": answer,
            "operations": operations,
            "expressions": expressions,
        }


def _items(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as lines:
        match path.suffix:
            case ".csv":
                return list(csv.DictReader(lines))
            case ".json":
                return json.load(lines)
            case _:
                return [json.loads(line) for line in lines if line.strip()]


def _parse(item: dict[str, Any]) -> tuple[str, float, int, list[str]]:
    """Question, answer, number of operations, and the calculations that lead to the answer; none if they are not known."""
    if "Numbers" in item:
        numbers = item["Numbers"].split()
        text = re.sub(r"number(\d+)", lambda match: numbers[int(match[1])], item["Question"])
        symbols = re.sub(r"number(\d+)", lambda match: numbers[int(match[1])], item["Equation"]).split()
        equation = _infix(iter(symbols))
        return _joined(text), _number(item["Answer"]), len(_WORD_OPERATOR.findall(item["Equation"])), [equation]
    if "Body" in item:
        body = item["Body"].strip()
        text = f"{body}{'' if body.endswith(('.', '?', '!', ',')) else ','} {item['Question'].strip()}"
        equation = item["Equation"]
        return _joined(text), _number(item["Answer"]), len(_WORD_OPERATOR.findall(equation)), [_compact(equation)]
    answer = str(item["answer"])
    solution = item.get("solution", answer)
    operations = item["operations"] if "operations" in item else _annotated(solution)
    expressions = [item["equation"]] if "equation" in item else _ANNOTATION.findall(solution)
    return item["question"], _number(answer.rpartition("####")[2]), operations, [_compact(e) for e in expressions]


def _annotated(solution: str) -> int:
    return sum(len(_OPERATOR.findall(expression)) for expression in _ANNOTATION.findall(solution))


def _infix(symbols: Iterator[str]) -> str:
    """The expression in prefix notation that ``symbols`` begin with, such as ``* + 3 4 2``, as ``(3+4)*2``."""
    symbol = next(symbols)
    if symbol not in "+-*/":
        return symbol.removesuffix(".0")
    sides = [_infix(symbols) for _ in range(2)]
    return symbol.join(f"({side})" if any(s in side for s in "+-*/") else side for side in sides)


def _compact(expression: str) -> str:
    """``expression`` without blanks and ``.0``, and without parentheses around the whole if it has no others."""
    text = re.sub(r"\.0(?!\d)", "", expression.replace(" ", ""))
    inner = text[1:-1]
    return inner if text.startswith("(") and text.endswith(")") and "(" not in inner else text


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
