"""The researcher of `agent` on questions of `multihop`: it reads the beginnings of Wikipedia's passages."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from agents import TResponseInputItem

from examples.rag import multihop
from examples.rag.agent import message, research
from examples.rag.reward import best_f1

EXAMPLES: list[TResponseInputItem] = [
    message("user", "When was the director of film The Glass Harbour born?"),
    message("assistant", "Search: The Glass Harbour"),
    message(
        "user",
        "The Glass Harbour: The Glass Harbour is a 1961 drama film directed by Edwin Halloway and starring Rosa Tiller. It was "
        "filmed in Streslau.",
    ),
    message("assistant", "Search: Edwin Halloway"),
    message(
        "user",
        "Edwin Halloway: Edwin Halloway (4 March 1919 – 12 June 1987) was a Ruritanian film director, known for his sea films.",
    ),
    message("assistant", "Answer: 4 March 1919"),
    message("user", "What is the population of the state where Corvale Airport is located?"),
    message("assistant", "Search: Corvale Airport"),
    message(
        "user",
        "Corvale Airport: Corvale Airport is a public airport two miles east of Corvale, in the state of Norland.",
    ),
    message("assistant", "Search: population of Norland"),
    message(
        "user",
        "Norland: Norland is a state in the north of Ruritania. Its capital is Streslau. As of 2012 its population was 1,204,300.",
    ),
    message("assistant", "Answer: 1,204,300"),
    message("user", "Where did Mathilde of Hentzau's father die?"),
    message("assistant", "Search: Mathilde of Hentzau"),
    message(
        "user",
        "Mathilde of Hentzau: Mathilde of Hentzau was a Ruritanian noblewoman, the second daughter of Count Albert of Hentzau.",
    ),
    message("assistant", "Search: Albert of Hentzau"),
    message(
        "user",
        "Albert of Hentzau: Albert, Count of Hentzau (1790 – 1851) was a Ruritanian general. He died in Zenda after a long illness.",
    ),
    message("assistant", "Answer: Zenda"),
]
"""Three conversations about things that do not exist; engines cache a shared prefix."""


async def solve(task: Mapping[str, Any]) -> float:
    """Answer a task's question; return the best F1 of the answer alone."""
    search = functools.partial(multihop.search, task["folders"])
    report = await research(task["question"], search, EXAMPLES, task["turns"])
    return best_f1(report.answer, task["answers"])
