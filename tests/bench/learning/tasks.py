"""The training tasks of studies with a warm start, without the demonstrated ones."""

from __future__ import annotations

from typing import Any

from examples.math_tool import word_problems
from examples.text_to_sql import spider

DEMONSTRATED = {"spider": 1000, "math": 48}
"""The number of training tasks whose gold solutions the policy learns before the runs."""


def spider_demonstrated(folder: str, **arguments: Any) -> list[spider.Task]:
    """Questions to demonstrate. Arguments as in `spider.train`."""
    return spider.train(folder, **arguments)[-DEMONSTRATED["spider"] :]


def spider_rest(folder: str, **arguments: Any) -> list[spider.Task]:
    """The other questions. Arguments as in `spider.train`."""
    return spider.train(folder, **arguments)[: -DEMONSTRATED["spider"]]


def math_demonstrated(folder: str, **arguments: Any) -> list[word_problems.Task]:
    """Problems to demonstrate. Arguments as in `word_problems.train`."""
    return word_problems.train(folder, **arguments)[-DEMONSTRATED["math"] :]


def math_rest(folder: str, **arguments: Any) -> list[word_problems.Task]:
    """The other problems. Arguments as in `word_problems.train`."""
    return word_problems.train(folder, **arguments)[: -DEMONSTRATED["math"]]
