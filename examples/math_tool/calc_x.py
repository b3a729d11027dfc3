"""Reads Calc-X and similar data sets.

The files are JSONL, JSON or parquet with the columns ``question`` and ``result``. Set them in the configuration::

    tasks:
      train: {source: "examples.math_tool.calc_x:read", args: {file: data/calc_x_train.jsonl}}
      eval: {source: "examples.math_tool.calc_x:read", args: {file: data/calc_x_test.jsonl}}

The column ``result_float`` takes precedence over ``result``; without either, the result at the end of the column ``chain`` is used.
Problems whose result is not a number (a formula, a choice) are skipped, because the reward compares numbers.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from examples.math_tool.tasks import Task
from lightning_core.rollouts.tasks import load_tasks

_STEP = re.compile(r'<gadget id="calculator">(.*?)</gadget>\s*<output>(.*?)</output>', re.DOTALL)
_RESULT = re.compile(r"<result>(.*?)</result>", re.DOTALL)
_MIXED = re.compile(r"(-?)(\d+)[_ ](\d+/\d+)")


def read(file: str) -> list[Task]:
    """The problems of ``file`` whose result is a number.

    ``steps`` are the calculations of the solution, read from the column ``chain`` if it exists.
    """
    tasks: list[Task] = []
    for item in load_tasks(file, key="tasks"):
        answer = _answer(item)
        if answer is not None:
            tasks.append({"id": item["id"], "question": item["question"], "steps": steps(item), "answer": answer})
    return tasks


def steps(item: dict[str, Any]) -> list[list[str]]:
    """The calculations in the column ``chain``, each with its output."""
    return [[expression.strip(), output.strip()] for expression, output in _STEP.findall(item.get("chain") or "")]


def parse_number(text: str) -> float | None:
    """Parse ``1,200``, ``0.5``, ``3/4`` or ``1_1/2``; None for anything else."""
    plain = text.strip().replace(",", "")
    mixed = _MIXED.fullmatch(plain)
    try:
        if mixed:
            number = int(mixed[2]) + Fraction(mixed[3])
            return float(-number if mixed[1] else number)
        return float(Fraction(plain))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _answer(item: dict[str, Any]) -> float | None:
    number = item.get("result_float")
    if number is not None:
        return parse_number(str(number))
    result = item.get("result")
    if result is None:
        results = _RESULT.findall(item.get("chain") or "")
        result = results[-1] if results else ""
    return parse_number(str(result))
