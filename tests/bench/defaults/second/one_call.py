"""Agents with one call: a conversion, a classification, an extraction, and a program with tests."""

from __future__ import annotations

import json
import random
import re

from lightning_core import trainable
from tests.bench.defaults.suite.agent import Agent, Task
from tests.bench.defaults.suite.chat import ask
from tests.bench.defaults.suite.words import NAMES, THINGS, plain


@trainable("scribe")
def write_roman(task: Task) -> str:
    shots = (("Chapter 7", "VII"), ("Section 21", "XXI"), ("King George 4", "IV"), ("Part 16", "XVI"))
    return ask("Write the number in Roman numerals.", shots, task["text"], tokens=8)


def roman_score(task: Task, answer: str) -> float:
    return float(answer.strip() == task["roman"])


def draw_roman(rng: random.Random) -> Task:
    number = rng.randint(1, 39)
    what = rng.choice(
        (
            "Chapter",
            "Section",
            "Part",
            "King Henry",
            "Volume",
            "Act",
            "Figure",
            "Table",
            "Chapel",
            "Year",
            "Page",
            "Song",
        )
    )
    ones = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")
    return {"text": f"{what} {number}", "roman": "X" * (number // 10) + ones[number % 10]}


_PRIORITIES = {
    "high": ("The {x}s of all staff are down.", "Nobody can work, every {x} fails.", "The {x} is on fire."),
    "medium": ("My {x} is slow today.", "The {x} fails now and then.", "One {x} of two does not start."),
    "low": ("Can I get a new {x} next year?", "The colour of the {x} is ugly.", "Please tidy up the {x} room."),
}


@trainable("dispatcher")
def prioritize(task: Task) -> str:
    shots = (("The server is down for all customers.", "high"), ("When do we get new chairs?", "low"))
    return ask("Answer with high, medium or low.", shots, task["text"], tokens=4)


def priority_score(task: Task, answer: str) -> float:
    return float(plain(answer) == task["priority"])


def draw_priority(rng: random.Random) -> Task:
    priority, name = rng.choice(list(_PRIORITIES)), rng.choice(NAMES)
    return {"text": f"{name}: {rng.choice(_PRIORITIES[priority]).format(x=rng.choice(THINGS))}", "priority": priority}


@trainable("accountant")
def read_invoice(task: Task) -> str:
    shots = (
        ("3 fans at 12 euros each, paid by Pia.", '{"item": "fan", "count": 3, "total": 36, "payer": "Pia"}'),
        ("Jon pays for 2 desks, 80 euros each.", '{"item": "desk", "count": 2, "total": 160, "payer": "Jon"}'),
    )
    return ask("Write the invoice as JSON.", shots, task["text"], tokens=40)


def invoice_score(task: Task, answer: str) -> float:
    """A quarter of the reward for each field."""
    try:
        found = json.loads(answer)
    except ValueError:
        return 0.0
    return sum(found.get(k) == v for k, v in task["invoice"].items()) / 4 if isinstance(found, dict) else 0.0


def draw_invoice(rng: random.Random) -> Task:
    count, price, item, payer = rng.randint(2, 9), rng.choice((5, 10, 20, 50)), rng.choice(THINGS), rng.choice(NAMES)
    form = rng.choice(("{n} {x}s at {p} euros each, paid by {w}.", "{w} pays for {n} {x}s, {p} euros each."))
    text = form.format(n=count, x=item, p=price, w=payer)
    return {"text": text, "invoice": {"item": item, "count": count, "total": count * price, "payer": payer}}


_CLASSES = {"digit": "[0-9]", "letter": "[a-z]", "x": "x"}
_PROBES = (
    "7",
    "42",
    "123",
    "1234",
    "a",
    "ab",
    "xyz",
    "abcd",
    "x",
    "xx",
    "xxx",
    "xxxx",
    "7a",
    "ab1",
    "a1b2",
    "x7",
    "",
    "12-34",
)
_SIMPLE = re.compile(r"(?:\[0-9\]|\[a-z\]|[a-z0-9-])(?:\{\d\}|\+)?(?:(?:\[0-9\]|\[a-z\]|[a-z0-9-])(?:\{\d\}|\+)?)*")


@trainable("matcher")
def write_pattern(task: Task) -> str:
    shots = (
        ("exactly 5 digits", "[0-9]{5}"),
        ("one or more letters", "[a-z]+"),
        ("5 letters, then a digit", "[a-z]{5}[0-9]"),
    )
    return ask("Write a regular expression.", shots, task["text"], tokens=20)


def pattern_score(task: Task, answer: str) -> float:
    """1 if the pattern matches the same texts; only classes, counts and plain characters run."""
    if len(answer) > 40 or not _SIMPLE.fullmatch(answer):
        return 0.0
    return float(all(bool(re.fullmatch(answer, p)) == bool(re.fullmatch(task["pattern"], p)) for p in task["probes"]))


def draw_pattern(rng: random.Random) -> Task:
    parts = [_part(rng) for _ in range(rng.choice((1, 2)))]
    text, pattern = ", then ".join(text for text, _ in parts), "".join(pattern for _, pattern in parts)
    examples = ["".join(_example(part, rng) for _, part in parts) for _ in range(6)]
    return {"text": text, "pattern": pattern, "probes": [*_PROBES, *examples]}


def _part(rng: random.Random) -> tuple[str, str]:
    kind, count = rng.choice(list(_CLASSES)), rng.randint(1, 9)
    form = rng.choice(("exactly", "many", "one"))
    if form == "exactly" and count > 1:
        return f"{rng.choice(('exactly ', ''))}{count} {kind}s", f"{_CLASSES[kind]}{{{count}}}"
    if form == "many":
        return f"one or more {kind}s", f"{_CLASSES[kind]}+"
    return f"a single {kind}", _CLASSES[kind]


def _example(part: str, rng: random.Random) -> str:
    own = re.fullmatch(r"(\[0-9\]|\[a-z\]|x)(?:\{(\d)\}|(\+))?", part)
    assert own is not None
    count = int(own[2]) if own[2] else rng.randint(1, 3) if own[3] else 1
    return "".join(rng.choice({"[0-9]": "0123456789", "[a-z]": "abcxyz", "x": "x"}[own[1]]) for _ in range(count))


ROMAN = Agent(
    name="roman",
    kind="conversion",
    solve=write_roman,
    score=roman_score,
    draw=draw_roman,
    ideal=lambda task: [task["roman"]],
    train=("scribe",),
    fact=lambda task: task["roman"],
)
PRIORITY = Agent(
    name="priority",
    kind="classification, 3 classes",
    solve=prioritize,
    score=priority_score,
    draw=draw_priority,
    ideal=lambda task: [task["priority"]],
    train=("dispatcher",),
)
INVOICE = Agent(
    name="invoice",
    kind="extraction, partial reward",
    solve=read_invoice,
    score=invoice_score,
    draw=draw_invoice,
    ideal=lambda task: [json.dumps(task["invoice"])],
    train=("accountant",),
)
PATTERN = Agent(
    name="pattern",
    kind="code with tests",
    solve=write_pattern,
    score=pattern_score,
    draw=draw_pattern,
    ideal=lambda task: [task["pattern"]],
    train=("matcher",),
)
