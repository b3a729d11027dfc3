"""Word problems with one operation, generated from templates with fixed seeds.

The pair of numbers of a test problem occurs in no training problem, and test problems use other names of people.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

_NAMES = {
    "train": ("Tom", "Ana", "Ben", "Mia", "Sam", "Lea", "Max", "Zoe"),
    "test": ("Eva", "Leo", "Kim", "Ida"),
}
_THINGS = ("apples", "books", "pens", "coins", "eggs", "cards", "cups", "toys")
_BOXES = ("boxes", "bags", "crates", "jars")
_TEMPLATES = {
    "{a}*{b}": (
        "{name} has {a} {boxes} with {b} {things} each. How many {things} are there?",
        "{name} buys {b} {things} a day. How many {things} is that in {a} days?",
        "Each of {a} {boxes} holds {b} {things}. How many {things} do they hold?",
    ),
    "{a}+{b}": (
        "{name} has {a} {things} and buys {b} more. How many {things} are there now?",
        "{name} has {a} {things}, {other} has {b}. How many {things} do they have together?",
        "There are {a} {things} here and {b} there. How many {things} are there in all?",
    ),
    "{a}-{b}": (
        "{name} had {a} {things} and gave away {b}. How many {things} are left?",
        "{name} has {a} {things}, {other} has {b}. How many more {things} does {name} have?",
        "{name} wants {a} {things} and has {b}. How many {things} are missing?",
    ),
    "{ab}/{b}": (
        "{name} puts {ab} {things} into {b} {boxes} equally. How many {things} are in each?",
        "{b} friends of {name} share {ab} {things} equally. How many {things} does each get?",
        "{name} eats {b} of {ab} {things} a day. For how many days do they last?",
    ),
}

Task = dict[str, Any]


def train(count: int = 2000) -> list[Task]:
    """Training problems."""
    return _problems("train", count)


def test(count: int = 200) -> list[Task]:
    """Held-out problems."""
    return _problems("test", count)


def held_out(a: int, b: int) -> bool:
    """Whether this pair of numbers is reserved for test problems, as one in eight is."""
    return zlib.crc32(f"{min(a, b)},{max(a, b)}".encode()) % 8 == 0


def _problems(split: str, count: int) -> list[Task]:
    rng = random.Random(split)
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        task = _problem(rng, split)
        tasks.setdefault(task["question"], {"id": f"{split}-{len(tasks)}", **task})
    return list(tasks.values())


def _problem(rng: random.Random, split: str) -> Task:
    b, a = sorted(_numbers(rng, split))
    expression = rng.choice(list(_TEMPLATES))
    values = {"a": a, "b": b, "ab": a * b}
    name, other = rng.sample(_NAMES[split], 2)
    words = {"name": name, "other": other, "boxes": rng.choice(_BOXES), "things": rng.choice(_THINGS)}
    answers = {"{a}*{b}": a * b, "{a}+{b}": a + b, "{a}-{b}": a - b, "{ab}/{b}": a}
    return {
        "question": rng.choice(_TEMPLATES[expression]).format(**words, **values),
        "expression": expression.format(**values),
        "answer": answers[expression],
    }


def _numbers(rng: random.Random, split: str) -> list[int]:
    while True:
        a, b = rng.sample(range(11, 100), 2)
        if held_out(a, b) == (split == "test"):
            return [a, b]
