"""A triage agent hands the conversation to one of two specialists, which answers in its own form."""

from __future__ import annotations

import random

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import THINGS, plain

_DESKS = {
    "billing": (
        "Invoice {n} for the {x} is wrong.",
        "I paid invoice {n} for the {x} twice.",
        "Refund the {x}, invoice {n}.",
    ),
    "repairs": (
        "The {x} from order {n} is broken.",
        "Order {n}: the {x} does not start.",
        "My {x} of order {n} makes noise.",
    ),
}
_TRIAGE = (
    ("I want my money back for invoice 88.", "handoff billing"),
    ("The toaster of order 41 burns everything.", "handoff repairs"),
)


@trainable("triage")
def _triage(text: str) -> str:
    return plain(ask("Hand off to billing or repairs.", _TRIAGE, text, tokens=8))


@trainable("billing")
def _billing(text: str) -> str:
    return ask("Write the invoice.", (("I want my money back for invoice 88.", "invoice 88"),), text, tokens=8)


@trainable("repairs")
def _repairs(text: str) -> str:
    return ask(
        "Write the broken thing.", (("The toaster of order 41 burns everything.", "repair toaster"),), text, tokens=8
    )


def solve(task: Task) -> str:
    specialist = {"handoff billing": _billing, "handoff repairs": _repairs}.get(_triage(task["text"]))
    return "" if specialist is None else specialist(task["text"])


def score(task: Task, answer: str) -> float:
    return float(plain(answer) == task["answer"])


def draw(rng: random.Random) -> Task:
    desk, thing, number = rng.choice(list(_DESKS)), rng.choice(THINGS), rng.randint(10, 999)
    text = rng.choice(_DESKS[desk]).format(x=thing, n=number)
    return {"text": text, "desk": desk, "answer": f"invoice {number}" if desk == "billing" else f"repair {thing}"}


HANDOFF = Agent(
    name="handoff",
    kind="handoff, three agents",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [f"handoff {task['desk']}", task["answer"]],
    train=("triage", "billing", "repairs"),
)
