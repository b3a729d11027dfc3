"""Three agents, two trained: origin and destination of a trip, then a price by a frozen agent."""

from __future__ import annotations

import random

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import CITIES, NAMES, plain

_TRIP = "Jon flies from Nice to Bonn."


@trainable("origin")
def _origin(text: str) -> str:
    return plain(ask("Where does the trip start?", ((_TRIP, "Nice"),), text, tokens=4))


@trainable("destination")
def _destination(text: str) -> str:
    return plain(ask("Where does the trip end?", ((_TRIP, "Bonn"),), text, tokens=4))


@trainable("seller")
def _price(line: str) -> str:
    return plain(ask("Repeat the price.", (("Nice to Bonn: 120", "120"), ("Bonn to Kiel: 75", "75")), line, tokens=4))


def _fare(start: str, end: str) -> int:
    cities = [city.lower() for city in CITIES]
    return 30 + 7 * cities.index(start) + 11 * cities.index(end)


def solve(task: Task) -> str:
    start, end = _origin(task["text"]), _destination(task["text"])
    if not {start, end} <= {city.lower() for city in CITIES}:
        return ""
    return _price(f"{start.title()} to {end.title()}: {_fare(start, end)}")


def score(task: Task, answer: str) -> float:
    return float(plain(answer) == str(task["fare"]))


def draw(rng: random.Random) -> Task:
    start, end = rng.sample(CITIES, 2)
    form = rng.choice(
        (
            "{n} flies from {a} to {b}.",
            "To {b} from {a}, for {n}.",
            "{n} leaves {a} for {b}.",
            "{n} comes to {b}, from {a}.",
        )
    )
    return {
        "text": form.format(n=rng.choice(NAMES), a=start, b=end),
        "trip": (start, end),
        "fare": _fare(start.lower(), end.lower()),
    }


TRIP = Agent(
    name="trip",
    kind="three agents, two trained",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [*task["trip"], str(task["fare"])],
    train=("origin", "destination"),
    frozen=("seller",),
    fact=lambda task: task["trip"],
)
