"""Questions about the shipped corpus, in three splits.

``train`` and ``test`` have the same forms of questions about different countries: no country of a test question, and nothing from
that country, occurs in training. ``test_form`` asks about people from the test countries, a form that does not occur in training.

A question has one hop if it names the country, and two hops if the country must be found first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from examples.rag.corpus import ATTRIBUTES, Country, countries, things

Task = dict[str, Any]

TEST_SHARE = 0.3
"""The share of countries reserved for test questions."""
FORMS = ("country", "capital", "landmark", "country", "mountain", "dish")
"""The starting points of questions, in turn. Of six, two have one hop and four have two."""

_CLAUSES = {
    "capital": "whose capital is {}",
    "landmark": "where {} is",
    "mountain": "where {} is",
    "dish": "that {} is from",
    "person": "where {} was born",
}


def train() -> list[Task]:
    """Training questions."""
    return _tasks("train", FORMS)


def test() -> list[Task]:
    """Questions of the same forms about countries not in training."""
    return _tasks("test", FORMS)


def test_form() -> list[Task]:
    """Questions of a form not in training, about the test countries."""
    return _tasks("test_form", ("person",))


def held_out() -> list[Task]:
    """``test`` and ``test_form`` together. A run's summary reports each separately."""
    return [*test(), *test_form()]


@cache
def test_countries() -> frozenset[str]:
    """The countries reserved for test questions."""
    names = sorted(countries())
    return frozenset(random.Random("countries").sample(names, round(TEST_SHARE * len(names))))


def _tasks(split: str, forms: Sequence[str]) -> list[Task]:
    """Questions of each form in turn until one runs out; every slice has the same mix."""
    rng = random.Random(split)
    pools: dict[str, list[Task]] = {form: [] for form in forms}
    for name, country in countries().items():
        if (name in test_countries()) != (split == "train"):
            for task in _questions(country, split):
                if task["form"] in pools:
                    pools[task["form"]].append(task)
    for pool in pools.values():
        rng.shuffle(pool)
    tasks: list[Task] = []
    while all(pools.values()):
        tasks += [pools[form].pop() for form in forms if pools[form]]
    return tasks


def _questions(country: Country, split: str) -> Iterator[Task]:
    """All questions about a country and things from it, except those its name answers."""
    starts = [("country", country.country), ("capital", country.capital)]
    starts += [(thing.kind, thing.name) for thing in things() if thing.country == country.country]
    for attribute, words in ATTRIBUTES.items():
        answer: str = getattr(country, attribute)
        if answer.lower() in country.country.lower():
            continue
        for form, start in starts:
            named = start if form == "country" else f"the country {_CLAUSES[form].format(start)}"
            yield {
                "id": f"{start} {attribute}".lower().replace(" ", "-"),
                "split": split,
                "form": form,
                "hops": 1 if form == "country" else 2,
                "question": f"What is the {words} of {named}?",
                "answers": [answer],
            }
