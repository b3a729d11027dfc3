"""Word problems with one operation, from templates, with fixed seeds.

Split by the pair of numbers *and* by the text: no test question, and no pair of numbers of one, occurs in training.
"""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("Tom", "Ana", "Ben", "Mia", "Sam", "Lea", "Max", "Zoe", "Eva", "Leo")
_THINGS = ("apples", "books", "pens", "coins", "eggs", "cards", "cups", "toys")
_BOXES = (("boxes", "box"), ("bags", "bag"), ("shelves", "shelf"), ("crates", "crate"), ("jars", "jar"))

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
        # One pair of numbers in ten belongs to the test questions, whichever way round it stands.
        held_out = (7 * min(a, b) + 3 * max(a, b)) % 10 == 0
        if held_out != (split == "test"):
            continue
        question, answer, kind = _word(rng, a, b)
        if question not in seen:
            seen.add(question)
            tasks.append(
                {"id": f"{split}-{len(tasks)}", "question": question, "answer": answer, "kind": kind, "pair": [a, b]}
            )
    return tasks


def _word(rng: random.Random, a: int, b: int) -> tuple[str, int, str]:
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    boxes, box = rng.choice(_BOXES)
    kind = rng.choice(("times", "plus", "minus", "divided"))
    if kind == "times":
        return f"{name} has {a} {boxes} with {b} {things} each. How many {things} in total?", a * b, kind
    if kind == "plus":
        return f"{name} has {a} {things} and buys {b} more. How many {things} now?", a + b, kind
    if kind == "minus":
        a, b = max(a, b) + 1, min(a, b)
        return f"{name} had {a} {things} and gave away {b}. How many {things} are left?", a - b, kind
    return f"{name} puts {a * b} {things} into {b} {boxes} equally. How many {things} per {box}?", a, kind
