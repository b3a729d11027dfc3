"""The training tasks of studies with a warm start: those that are demonstrated, and the others.

A task whose gold answer is demonstrated in another wording or with other numbers is in neither part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from examples.math_tool import word_problems
from examples.text_to_sql import spider

Task = dict[str, Any]


def spider_demonstrated(folder: str, *, demonstrations: int, **arguments: Any) -> list[Task]:
    """Questions to demonstrate. Other arguments as in `spider.train`."""
    return spider.train(folder, **arguments)[-demonstrations:]


def spider_rest(folder: str, *, demonstrations: int, **arguments: Any) -> list[Task]:
    """The other questions, without those that have a demonstrated query: Spider asks for most queries in two wordings."""
    return _rest(
        spider.train(folder, **arguments), demonstrations, lambda task: (task["schema"], _squeezed(task["sql"]))
    )


def math_demonstrated(folder: str, *, demonstrations: int, **arguments: Any) -> list[Task]:
    """Problems to demonstrate. Other arguments as in `word_problems.train`."""
    return word_problems.train(folder, **arguments)[-demonstrations:]


def math_rest(folder: str, *, demonstrations: int, **arguments: Any) -> list[Task]:
    """The other problems, without those that differ from a demonstrated one in their numbers only."""
    return _rest(
        word_problems.train(folder, **arguments),
        demonstrations,
        lambda task: re.sub(r"[^a-z]", "", task["question"].lower()),
    )


def _rest(tasks: Sequence[Task], demonstrations: int, same: Callable[[Task], Hashable]) -> list[Task]:
    shown = {same(task) for task in tasks[-demonstrations:]}
    return [task for task in tasks[:-demonstrations] if same(task) not in shown]


def _squeezed(sql: str) -> str:
    return "".join(sql.lower().split())
