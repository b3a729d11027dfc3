"""Two agents: one names the operation, the other writes it with the numbers."""

from __future__ import annotations

import random

from examples.calculator.agent import evaluate
from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import NAMES, THINGS, plain

_OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*"}
_PLANS = (
    ("A box has 4 pens. How many are in 3 boxes?", "multiply"),
    ("Ann had 9 pens and lost 2. How many now?", "subtract"),
    ("Ann has 7 pens, Joe has 5. How many together?", "add"),
)
_WORK = (
    ("multiply: A box has 4 pens. How many are in 3 boxes?", "4*3"),
    ("subtract: Ann had 9 pens and lost 2.", "9-2"),
    ("add: Ann has 7 pens, Joe has 5. How many together?", "7+5"),
)


@trainable("planner")
def _plan(text: str) -> str:
    return plain(ask("Answer with add, subtract or multiply.", _PLANS, text, tokens=5))


@trainable("worker")
def _work(operation: str, text: str) -> str:
    return ask("Write the calculation.", _WORK, f"{operation}: {text}", tokens=10)


def solve(task: Task) -> str:
    operation = _plan(task["text"])
    return _work(operation, task["text"]) if operation in _OPERATIONS else ""


def score(task: Task, answer: str) -> float:
    return float(evaluate(answer) == str(task["answer"]))


def draw(rng: random.Random) -> Task:
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(11, 40), rng.randint(2, 10)
    text, operation, answer = rng.choice(
        (
            (f"{name} had {a} {thing}s and got {b} more. How many now?", "add", a + b),
            (f"{name} had {a} {thing}s and sold {b}. How many are left?", "subtract", a - b),
            (f"A crate holds {a} {thing}s. How many are in {b} crates?", "multiply", a * b),
            (f"There are {a} {thing}s here and {b} there. How many together?", "add", a + b),
        )
    )
    return {"text": text, "operation": operation, "work": f"{a}{_OPERATIONS[operation]}{b}", "answer": answer}


CALCULATE = Agent(
    name="calculate",
    kind="two agents",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [task["operation"], task["work"]],
    train=("planner", "worker"),
)
