"""Word problems with one operation, generated from templates with fixed seeds.

The split is by text and by pair of numbers: no test question, and no pair of numbers of a test question, occurs in training.
"""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("Tom", "Ana", "Ben", "Mia", "Sam", "Lea", "Max", "Zoe", "Eva", "Leo")
_THINGS = ("apples", "books", "pens", "coins", "eggs", "cards", "cups", "toys")
_BOXES = (("boxes", "box"), ("bags", "bag"), ("shelves", "shelf"), ("crates", "crate"), ("jars", "jar"))
_TEMPLATES = {
    "times": (
        "{name} has {a} {boxes} with {b} {things} each. How many {things} in total?",
        "There are {a} {boxes}, and each {box} holds {b} {things}. How many {things} are there?",
        "{name} buys {b} {things} a day. How many {things} is that in {a} days?",
    ),
    "plus": (
        "{name} has {a} {things} and buys {b} more. How many {things} now?",
        "{name} has {a} {things}, {other} has {b}. How many {things} do they have together?",
        "There are {a} {things} in one {box} and {b} in another. How many {things} are in both?",
    ),
    "minus": (
        "{name} had {a} {things} and gave away {b}. How many {things} are left?",
        "Of {a} {things}, {name} sold {b}. How many {things} remain?",
        "{name} has {a} {things}, {other} has {b}. How many more {things} does {name} have?",
    ),
    "divided": (
        "{name} puts {product} {things} into {b} {boxes} equally. How many {things} per {box}?",
        "{b} friends share {product} {things} equally. How many {things} does each get?",
        "{name} packs {product} {things}, {b} in each {box}. How many {boxes} are needed?",
    ),
}

Task = dict[str, Any]


def train(count: int = 2000) -> list[Task]:
    """Training problems."""
    return _problems("train", count)


def test(count: int = 200) -> list[Task]:
    """Held-out problems."""
    return _problems("test", count)


def _problems(split: str, count: int) -> list[Task]:
    rng = random.Random(split)
    seen: set[str] = set()
    tasks: list[Task] = []
    while len(tasks) < count:
        a, b = rng.randint(11, 99), rng.randint(11, 99)
        # One pair of numbers in ten is reserved for test questions, in either order.
        held_out = (7 * min(a, b) + 3 * max(a, b)) % 10 == 0
        if held_out != (split == "test"):
            continue
        kind = rng.choice(list(_TEMPLATES))
        if kind == "minus":
            a, b = max(a, b), min(a, b)
        question = _question(rng, kind, a, b)
        if a != b and question not in seen:
            seen.add(question)
            answer = {"times": a * b, "plus": a + b, "minus": a - b, "divided": a}[kind]
            identity = f"{split}-{len(tasks)}"
            tasks.append({"id": identity, "question": question, "answer": answer, "kind": kind, "pair": [a, b]})
    return tasks


def _question(rng: random.Random, kind: str, a: int, b: int) -> str:
    name, other = rng.sample(_NAMES, 2)
    boxes, box = rng.choice(_BOXES)
    things = rng.choice(_THINGS)
    template = rng.choice(_TEMPLATES[kind])
    return template.format(name=name, other=other, boxes=boxes, box=box, things=things, a=a, b=b, product=a * b)
