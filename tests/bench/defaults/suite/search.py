"""A query for a price list, then the price."""

from __future__ import annotations

import random
import re

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import CITIES, THINGS, plain

_PRICES = {
    f"{thing} {city}": 10 + (7 * i + 13 * j) % 90 for i, thing in enumerate(THINGS) for j, city in enumerate(CITIES)
}
_QUERIES = (("What does a fan cost in Bonn?", "fan Bonn"),)
_ANSWERS = (("Price list: a fan in Bonn costs 12 euros. What does a fan cost?", "12"),)


@trainable("searcher")
def solve(task: Task) -> str:
    words = set(re.findall(r"\w+", ask("Write a search query.", _QUERIES, task["text"], tokens=8).lower()))
    key = max(_PRICES, key=lambda key: len(words & set(key.lower().split())))
    thing, city = key.split()
    passage = f"Price list: a {thing} in {city} costs {_PRICES[key]} euros."
    return ask("Answer with the number.", _ANSWERS, f"{passage} {task['text']}", tokens=6)


def score(task: Task, answer: str) -> float:
    return float(plain(answer) == str(task["answer"]))


def draw(rng: random.Random) -> Task:
    key = rng.choice(list(_PRICES))
    thing, city = key.split()
    form = rng.choice(
        ("What does a {t} cost in {c}?", "How much is a {t} in {c}?", "In {c}, what is the price of a {t}?")
    )
    return {"key": key, "text": form.format(t=thing, c=city), "answer": _PRICES[key]}


SEARCH = Agent(
    name="search",
    kind="search, 2 calls",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [task["key"], str(task["answer"])],
    train=("searcher",),
)
