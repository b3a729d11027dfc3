"""A simulated customer leaves out the size or the milk; the agent asks, then writes the order."""

from __future__ import annotations

import random

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import complete, messages
from tests.bench.defaults.suite.words import plain

_CALLS = 4
_DRINKS = ("latte", "mocha", "cocoa", "chai", "cappuccino", "macchiato")
_SIZES = ("small", "medium", "large")
_MILKS = ("oat", "soy", "whole", "almond")
_SHOTS = (
    ("A large tea, please.", "milk?"),
    ("With soy milk.", "order: large tea soy"),
    ("Hello, a tea with oat milk.", "size?"),
    ("Make it small.", "order: small tea oat"),
)


@trainable("waiter")
def solve(task: Task) -> str:
    turns = [task["text"]]
    for _ in range(_CALLS):
        said = complete(messages("Ask size? or milk? if it is missing, then write the order.", _SHOTS, *turns), 12)
        if said.startswith("order:"):
            return said
        turns += [said, _reply(task, plain(said))]
    return ""


def _reply(task: Task, said: str) -> str:
    if said.startswith("size"):
        return f"Make it {task['size']}."
    return f"With {task['milk']} milk." if said.startswith("milk") else "Sorry?"


def score(task: Task, answer: str) -> float:
    """A third of the reward for each of size, drink and milk."""
    words = plain(answer).removeprefix("order:").split()
    wanted = (task["size"], task["drink"], task["milk"])
    return sum(a == b for a, b in zip(words, wanted, strict=True)) / 3 if len(words) == len(wanted) else 0.0


def draw(rng: random.Random) -> Task:
    task = {"drink": rng.choice(_DRINKS), "size": rng.choice(_SIZES), "milk": rng.choice(_MILKS)}
    missing = rng.choice(("size", "milk", "both"))
    hello = rng.choice(("", "Hello, ", "Hi, ", "Good morning, ", "Excuse me, "))
    form = {"size": "a {drink} with {milk} milk", "milk": "a {size} {drink}", "both": "a {drink}"}[missing]
    end = rng.choice(("", ", please", " to go", " for here"))
    text = f"{hello}{form.format(**task)}{end}."

    return {**task, "text": text, "missing": missing}


def ideal(task: Task) -> list[str]:
    asked = {"size": ["size?"], "milk": ["milk?"], "both": ["size?", "milk?"]}[task["missing"]]
    return [*asked, f"order: {task['size']} {task['drink']} {task['milk']}"]


WAITER = Agent(
    name="waiter",
    kind="simulated user, 2-4 calls",
    solve=solve,
    score=score,
    draw=draw,
    ideal=ideal,
    train=("waiter",),
)
