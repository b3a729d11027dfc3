"""Fields of a sentence as JSON; a third of the reward for each."""

from __future__ import annotations

import json
import random

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import CITIES, NAMES

_KEYS = ("name", "age", "city")
_SHOTS = (
    ("Pia is 31 years old and lives in Rome.", '{"name": "Pia", "age": 31, "city": "Rome"}'),
    ("From Oslo comes Jon, who turned 58.", '{"name": "Jon", "age": 58, "city": "Oslo"}'),
)
_FORMS = (
    "{name} is {age} years old and lives in {city}.",
    "From {city} comes {name}, who turned {age}.",
    "At {age}, {name} moved to {city}.",
    "In {city} we met {name}, aged {age}.",
)


@trainable("extractor")
def solve(task: Task) -> str:
    return ask("Write the person as JSON.", _SHOTS, task["text"], tokens=28)


def score(task: Task, answer: str) -> float:
    try:
        found = json.loads(answer)
    except ValueError:
        return 0.0
    return sum(found.get(key) == task[key] for key in _KEYS) / len(_KEYS) if isinstance(found, dict) else 0.0


def draw(rng: random.Random) -> Task:
    task = {"name": rng.choice(NAMES), "age": rng.randint(18, 90), "city": rng.choice(CITIES)}
    return {**task, "text": rng.choice(_FORMS).format(**task)}


EXTRACT = Agent(
    name="extract",
    kind="extraction, partial reward",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [json.dumps({key: task[key] for key in _KEYS})],
    train=("extractor",),
)
