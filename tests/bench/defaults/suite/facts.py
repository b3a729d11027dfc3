"""A question that the text answers with yes or no, or does not answer."""

from __future__ import annotations

import random

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import NAMES, plain

_PETS = ("dog", "cat", "horse", "parrot", "rabbit")
_SHOTS = (
    ("Pia's pet is a dog. Jon's pet is a cat. Is Pia's pet a dog?", "yes"),
    ("Pia's pet is a dog. Jon's pet is a cat. Is Jon's pet a dog?", "no"),
    ("Pia's pet is a dog. Jon's pet is a cat. Is Uma's pet a dog?", "unknown"),
)


@trainable("reader")
def solve(task: Task) -> str:
    return ask("Answer with yes, no or unknown.", _SHOTS, task["text"], tokens=4)


def score(task: Task, answer: str) -> float:
    return float(plain(answer) == task["answer"])


def draw(rng: random.Random) -> Task:
    first, second, other = rng.sample(NAMES, 3)
    pets = rng.sample(_PETS, 2)
    name, answer = rng.choice((first, second, other)), "unknown"
    pet = rng.choice(pets)
    if name != other:
        answer = "yes" if pets[(first, second).index(name)] == pet else "no"
    text = f"{first}'s pet is a {pets[0]}. {second}'s pet is a {pets[1]}. Is {name}'s pet a {pet}?"
    return {"text": text, "answer": answer}


FACTS = Agent(
    name="facts",
    kind="classification, yes, no or unknown",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [task["answer"]],
    train=("reader",),
)
