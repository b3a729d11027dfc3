"""Questions over the shipped corpus, in three splits.

``train`` and ``test`` ask the same forms of questions about different countries: no country of a test question, and nothing that is
from it, occurs in training. ``test_form`` asks about people from the test countries, and training never asks about people.

A question is one hop from its answer if it names the country, else two: the country has to be found first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from examples.rag.corpus import ATTRIBUTES, Country, countries, things

Task = dict[str, Any]

TEST_SHARE = 0.3
"""The part of the countries that only tests ask about."""
FORMS = ("country", "capital", "landmark", "country", "mountain", "dish")
"""What questions begin at, in turn; of six, two are one hop and four are two."""

_CLAUSES = {
    "capital": "whose capital is {}",
    "landmark": "where {} is",
    "mountain": "where {} is",
    "dish": "that {} is from",
    "person": "where {} was born",
}


def train() -> list[Task]:
    """Questions to learn from."""
    return _tasks("train", FORMS)


def test() -> list[Task]:
    """The same forms of questions about countries that training never mentions."""
    return _tasks("test", FORMS)


def test_form() -> list[Task]:
    """Questions of a form that training never shows, about the test countries."""
    return _tasks("test_form", ("person",))


def held_out() -> list[Task]:
    """``test`` and ``test_form`` together; a task's ``split`` says which, and a run's summary tells them apart."""
    return [*test(), *test_form()]


@cache
def test_countries() -> frozenset[str]:
    """The countries that only tests ask about."""
    names = sorted(countries())
    return frozenset(random.Random("countries").sample(names, round(TEST_SHARE * len(names))))


def _tasks(split: str, forms: Sequence[str]) -> list[Task]:
    """Forms in turn, until one has no question left: any slice has about the same mix."""
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
    """Everything that is asked about a country and about what is from it, unless the country's name gives it away."""
    starts = [("country", country.country), ("capital", country.capital)]
    starts += [(thing.kind, thing.name) for thing in things() if thing.country == country.country]
    for attribute, asked in ATTRIBUTES.items():
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
                "question": f"What is the {asked} of {named}?",
                "answers": [answer],
            }
