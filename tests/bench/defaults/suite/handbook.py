"""A question about one of the lines of a handbook: more than 1,000 tokens of prompt, which the tasks of a handbook share."""

from __future__ import annotations

import random
from functools import cache

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import CITIES, plain

_COSTS = ("hotels", "meals", "taxis", "trains", "gifts", "books")
_HANDBOOKS = 3
_QUESTIONS = ("What is the limit for {x} in {c}?", "Limit for {x} in {c}?", "In {c}, what is the limit for {x}?")
_SHOTS = (("The limit for coffee in Nice is 14 euros. What is the limit for coffee in Nice?", "14"),)


@trainable("clerk")
def solve(task: Task) -> str:
    return ask("Answer with the number.", _SHOTS, task["text"], tokens=6)


def score(task: Task, answer: str) -> float:
    return float(plain(answer) == str(task["answer"]))


@cache
def _handbook(number: int) -> tuple[dict[tuple[str, str], int], str]:
    """The limits and the text of a handbook."""
    rng = random.Random(number)
    places = [(cost, city) for cost in _COSTS for city in CITIES]
    rng.shuffle(places)
    limits = {place: rng.randint(11, 99) for place in places}
    lines = (
        f"{n}. The limit for {cost} in {city} is {limit} euros for each day."
        for n, ((cost, city), limit) in enumerate(limits.items(), 1)
    )
    return limits, "\n".join(lines)


def draw(rng: random.Random) -> Task:
    limits, text = _handbook(rng.randrange(_HANDBOOKS))
    cost, city = rng.choice(list(limits))
    question = rng.choice(_QUESTIONS).format(x=cost, c=city)
    return {"text": f"{text}\n{question}", "answer": limits[cost, city], "place": (cost, city)}


HANDBOOK = Agent(
    name="handbook",
    kind="long prompt, 1,000 tokens",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [str(task["answer"])],
    train=("clerk",),
    fact=lambda task: task["place"],
)
