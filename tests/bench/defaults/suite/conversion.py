"""A tool call with a number and two units, then the number that the tool returned."""

from __future__ import annotations

import random
import re

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import plain

_UNITS = {("km", "m"): 1000, ("m", "cm"): 100, ("kg", "g"): 1000, ("h", "min"): 60, ("min", "s"): 60, ("l", "ml"): 1000}
_WORDS = {
    "km": "kilometres",
    "m": "metres",
    "cm": "centimetres",
    "kg": "kilograms",
    "g": "grams",
    "h": "hours",
    "min": "minutes",
    "s": "seconds",
    "l": "litres",
    "ml": "millilitres",
}
_CALLS = (
    ("How many grams are 3 kilograms?", "convert(3, kg, g)"),
    ("7 hours in minutes?", "convert(7, h, min)"),
    ("Convert 8 metres to centimetres.", "convert(8, m, cm)"),
    ("How many millilitres are 5 litres?", "convert(5, l, ml)"),
)
_RESULTS = (("Tool: 3000 g. How many grams are 3 kilograms?", "3000"), ("Tool: 420 min. 7 hours in minutes?", "420"))


@trainable("converter")
def solve(task: Task) -> str:
    call = re.fullmatch(r"convert\((\d{1,6}), (\w+), (\w+)\)", ask("Call the tool.", _CALLS, task["text"], tokens=14))
    factor = call and _UNITS.get((call[2], call[3]))
    if not call or not factor:
        return ""
    result = f"Tool: {int(call[1]) * factor} {call[3]}. {task['text']}"
    return ask("Give the result.", _RESULTS, result, tokens=10)


def score(task: Task, answer: str) -> float:
    return float(plain(answer) == str(task["answer"]))


def draw(rng: random.Random) -> Task:
    ((of, to), factor), number = rng.choice(list(_UNITS.items())), rng.randint(2, 40)
    form = rng.choice(("How many {to} are {n} {of}?", "{n} {of} in {to}?", "Convert {n} {of} to {to}."))
    text = form.format(n=number, of=_WORDS[of], to=_WORDS[to])
    return {"text": text, "call": f"convert({number}, {of}, {to})", "answer": number * factor, "number": number}


CONVERT = Agent(
    name="convert",
    kind="tool loop, 2 calls",
    solve=solve,
    score=score,
    draw=draw,
    ideal=lambda task: [task["call"], str(task["answer"])],
    train=("converter",),
    fact=lambda task: task["number"],
)
