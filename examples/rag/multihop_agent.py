"""The researcher of `agent` on questions of `multihop`: it reads the beginnings of Wikipedia's passages."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from agents import TResponseInputItem

from examples.rag import multihop
from examples.rag.agent import message, research
from examples.rag.reward import best_f1

_SOLVED = (
    (
        "Where was the director of film The Glass Harbour born?",
        "The Glass Harbour",
        "The Glass Harbour: The Glass Harbour is a 1961 drama film directed by Edwin Halloway and starring Rosa Tiller.",
        "Edwin Halloway",
        "Edwin Halloway: Edwin Halloway (4 March 1919 – 12 June 1987) was a film director. He was born in Corvale.",
        "Corvale",
    ),
    (
        "What is the population of the state where Corvale Airport is located?",
        "Corvale Airport",
        "Corvale Airport: Corvale Airport is a public airport two miles east of Corvale, in the state of Norland.",
        "population of Norland",
        "Norland: Norland is a state in the north. Its capital is Streslau. As of 2012 its population was 1,204,300.",
        "1,204,300",
    ),
    (
        "When did Mathilde of Hentzau's father die?",
        "Mathilde of Hentzau",
        "Mathilde of Hentzau: Mathilde of Hentzau was a noblewoman, the second daughter of Count Albert of Hentzau.",
        "Albert of Hentzau",
        "Albert of Hentzau: Albert, Count of Hentzau (2 May 1790 – 8 July 1851) was a general, known for his horses.",
        "8 July 1851",
    ),
)


def _conversation(
    question: str, first: str, passage: str, second: str, other: str, answer: str
) -> list[TResponseInputItem]:
    return [
        message("user", question),
        message("assistant", f"Search: {first}"),
        message("user", passage),
        message("assistant", f"Search: {second}"),
        message("user", other),
        message("assistant", f"Answer: {answer}"),
    ]


EXAMPLES = [item for solved in _SOLVED for item in _conversation(*solved)]
"""Three conversations about things that do not exist; engines cache a shared prefix."""


async def solve(task: Mapping[str, Any]) -> float:
    """Answer a task's question; return the best F1 of the answer alone."""
    search = functools.partial(multihop.search, task["folders"])
    examples = EXAMPLES if task.get("examples", True) else []
    report = await research(task["question"], search, examples, task["turns"])
    return best_f1(report.answer, task["answers"])
