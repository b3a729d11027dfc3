"""Reads the tasks and the function docs of the wheel ``bfcl-eval``; none of its files is part of this repository.

Only the wheel's multi-turn part is imported. It needs ``mpmath``, but none of the packages that the wheel requires otherwise.
"""

from __future__ import annotations

import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any

VERSION = "2026.3.23"
"""Other versions can have other tasks, so splits and results would not be comparable."""
INSTALL = f"pip install --no-deps bfcl-eval=={VERSION} && pip install mpmath"

try:
    import bfcl_eval
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import math_api  # checks that mpmath is there
except ImportError as error:
    raise ImportError(f"examples.bfcl requires the wheel bfcl-eval and mpmath: {error}. Run: {INSTALL}") from error

if (_found := importlib.metadata.version("bfcl-eval")) != VERSION:
    raise ImportError(f"found bfcl-eval {_found}, expected {VERSION}. Run: {INSTALL}")

__all__ = [
    "INSTALL",
    "VERSION",
    "entries",
    "function_docs",
    "gold",
    "math_api",
    "multi_turn_checker",
    "multi_turn_utils",
]

_DATA = Path(bfcl_eval.__file__).parent / "data"
_TASKS = "BFCL_v4_multi_turn_base.json"


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The 200 tasks of ``multi_turn_base`` by id, in the wheel's order."""
    return {entry["id"]: entry for entry in _lines(_DATA / _TASKS)}


@cache
def gold() -> dict[str, list[list[str]]]:
    """The gold calls of each task, by turn, as the source of Python calls."""
    return {answer["id"]: answer["ground_truth"] for answer in _lines(_DATA / "possible_answer" / _TASKS)}


@cache
def function_docs(class_name: str) -> dict[str, dict[str, Any]]:
    """The descriptions of a class's functions, by name."""
    path = _DATA / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]
    return {doc["name"]: doc for doc in _lines(path)}


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
