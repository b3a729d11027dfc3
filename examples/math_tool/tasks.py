"""Word problems with one operation or two, from templates, with fixed seeds.

No two numbers that stand in one test problem stand together in a training problem, and test problems are about other people.
"""

from __future__ import annotations

import random
import zlib
from itertools import combinations
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
    ),
    "{a}+{b}": (
        "{name} has {a} {things} and buys {b} more. How many {things} are there now?",
        "{name} has {a} {things}, {other} has {b}. How many {things} do they have together?",
    ),
    "{a}-{b}": (
        "{name} had {a} {things} and gave away {b}. How many {things} are left?",
        "{name} has {a} {things}, {other} has {b}. How many more {things} does {name} have?",
    ),
    "{ab}/{b}": (
        "{name} puts {ab} {things} into {b} {boxes} equally. How many {things} are in each?",
        "{b} friends of {name} share {ab} {things} equally. How many {things} does each get?",
    ),
    "{a}*{b}+{c}": (
        "{name} has {a} {boxes} with {b} {things} each, and {c} more. How many {things} are there?",
        "{name} buys {b} {things} a day for {a} days, then {c} more. How many {things} is that?",
    ),
    "{a}*{b}-{c}": (
        "{name} had {a} {boxes} with {b} {things} each and sold {c} {things}. How many {things} are left?",
        "{name} bought {b} {things} a day for {a} days and lost {c}. How many {things} are left?",
    ),
    "{a}+{b}-{c}": (
        "{name} had {a} {things}, bought {b} more and gave away {c}. How many {things} are left?",
        "{name} has {a} {things}, {other} has {b}. They lose {c}. How many {things} do they have together?",
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
    """Whether this pair of numbers, in any order, belongs to the test problems: one pair in eight does."""
    return zlib.crc32(f"{min(a, b)},{max(a, b)}".encode()) % 8 == 0


def _problems(split: str, count: int) -> list[Task]:
    rng = random.Random(split)
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        expression = rng.choice(list(_TEMPLATES))
        task = _problem(rng, split, expression, _numbers(rng, split, 3 if "{c}" in expression else 2))
        if task["answer"] > 0:
            tasks.setdefault(task["question"], {"id": f"{split}-{len(tasks)}", **task})
    return list(tasks.values())


def _numbers(rng: random.Random, split: str, count: int) -> list[int]:
    while True:
        numbers = rng.sample(range(11, 100), count)
        if all(held_out(*pair) == (split == "test") for pair in combinations(numbers, 2)):
            return numbers


def _problem(rng: random.Random, split: str, expression: str, numbers: list[int]) -> Task:
    a, b = numbers[:2]
    values = {"a": a, "b": b, "c": numbers[-1], "ab": a * b}
    name, other = rng.sample(_NAMES[split], 2)
    words = {"name": name, "other": other, "boxes": rng.choice(_BOXES), "things": rng.choice(_THINGS)}
    answers = {
        "{a}*{b}": a * b,
        "{a}+{b}": a + b,
        "{a}-{b}": a - b,
        "{ab}/{b}": a,
        "{a}*{b}+{c}": a * b + numbers[-1],
        "{a}*{b}-{c}": a * b - numbers[-1],
        "{a}+{b}-{c}": a + b - numbers[-1],
    }
    return {
        "question": rng.choice(_TEMPLATES[expression]).format(**words, **values),
        "expression": expression.format(**values),
        "answer": answers[expression],
    }
