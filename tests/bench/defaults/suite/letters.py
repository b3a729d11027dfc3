"""Letters in alphabetical order: the form is easy, the task is not."""

from __future__ import annotations

import random

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask

_SHOTS = (("d b a", "a b d"), ("m f k", "f k m"), ("z c t", "c t z"), ("b q e", "b e q"), ("x h p", "h p x"))


@trainable("sorter")
def solve(task: Task) -> str:
    return ask("Sort the letters.", _SHOTS, task["text"], tokens=12)


def score(task: Task, answer: str) -> float:
    return float(answer == task["sorted"])


def draw(rng: random.Random) -> Task:
    letters = rng.sample("abcdefghijklmnopqrstuvwxyz", 3)
    return {"text": " ".join(letters), "sorted": " ".join(sorted(letters))}


LETTERS = Agent(
    name="letters",
    kind="one call, order",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [task["sorted"]],
    train=("sorter",),
    fact=lambda task: task["sorted"],
)
