"""The shipped corpus: about 870 one-sentence documents on countries and things from them.

A document on a capital, landmark, mountain, dish or person names only its country. The currency, language and calling code of a
country are in separate documents, which name none of these things. A question from a dish to a currency therefore needs two searches.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"
ATTRIBUTES = {"currency": "currency", "language": "language", "code": "calling code"}
"""The attributes of a country: columns of ``countries.tsv`` and their names in sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A searchable text with its title."""

    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Country:
    """A line of ``countries.tsv``. The name includes its article, if it has one."""

    country: str
    capital: str
    currency: str
    language: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """A line of ``things.tsv``."""

    name: str
    kind: str
    noun: str
    country: str


@cache
def countries() -> Mapping[str, Country]:
    """All countries by name."""
    return {row["country"]: Country(**row) for row in _read("countries.tsv")}


@cache
def things() -> tuple[Thing, ...]:
    """Landmarks, mountains, dishes and people."""
    return tuple(Thing(**row) for row in _read("things.tsv"))


@cache
def documents() -> tuple[Document, ...]:
    """The corpus."""
    facts = [
        Document(title=f"{words} of {c.country}", text=f"The {words} of {c.country} is {getattr(c, attribute)}.")
        for c in countries().values()
        for attribute, words in ATTRIBUTES.items()
    ]
    capitals = [
        Document(title=c.capital, text=f"{c.capital} is the capital of {c.country}.") for c in countries().values()
    ]
    return (*facts, *capitals, *(Document(title=thing.name, text=_describe(thing)) for thing in things()))


def _describe(thing: Thing) -> str:
    if thing.kind == "person":
        return f"{thing.name}, a {thing.noun}, was born in {thing.country}."
    return f"{thing.name} is a {thing.noun} {'from' if thing.kind == 'dish' else 'in'} {thing.country}."


def _read(file: str) -> list[dict[str, str]]:
    with (DATA / file).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))
