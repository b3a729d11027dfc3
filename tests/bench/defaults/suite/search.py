"""A query for a price list, then the price."""

from __future__ import annotations

import random
import re

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import CITIES, THINGS, plain

_KEYS = [f"{thing} {city}" for thing in THINGS for city in CITIES]
_PRICES = dict(zip(_KEYS, random.Random(0).sample(range(100, 1000), len(_KEYS)), strict=True))
_QUERIES = (("What does a fan cost in Bonn?", "fan Bonn"),)
_ANSWERS = (("Price list: a fan in Bonn costs 125 euros. What does a fan cost?", "125"),)


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
        (
            "What does a {t} cost in {c}?",
            "How much is a {t} in {c}?",
            "In {c}, what is the price of a {t}?",
            "I need a {t} in {c}. What does it cost?",
            "Price of a {t}, {c}?",
        )
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
    fact=lambda task: task["key"],
)
