"""One of four queues for a message."""

from __future__ import annotations

import random

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import THINGS, plain

QUEUES = {
    "billing": ("I was charged twice for {x}.", "The invoice for {x} is wrong.", "Please refund my {x}."),
    "technical": ("My {x} does not start.", "The {x} shows an error.", "I cannot log in to the {x}."),
    "shipping": ("Where is the {x} that I ordered?", "My {x} arrived broken.", "The {x} went to a wrong address."),
    "sales": ("What does a {x} cost?", "Do you have a {x} in blue?", "Can I get a discount on ten {x}s?"),
}
_SHOTS = (("My laptop gets very hot.", "technical"), ("I paid, but my card was charged again.", "billing"))


@trainable("router")
def solve(task: Task) -> str:
    return ask(f"Answer with one word: {', '.join(QUEUES)}.", _SHOTS, task["text"], tokens=6)


def score(task: Task, answer: str) -> float:
    return float(plain(answer) == task["queue"])


def draw(rng: random.Random) -> Task:
    queue = rng.choice(list(QUEUES))
    return {"queue": queue, "text": rng.choice(QUEUES[queue]).format(x=rng.choice(THINGS))}


ROUTE = Agent(
    name="route",
    kind="classification, 4 classes",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [task["queue"]],
    train=("router",),
)
