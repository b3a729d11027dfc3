"""The shipped corpus: some 870 documents of one sentence on countries, their capitals, and landmarks, mountains, dishes and people.

A document on a capital, a dish and so on names its country and nothing else; the currency, the language and the calling code of a
country stand in a document each, which name none of these. So a question from a dish to a currency takes two searches.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"
ATTRIBUTES = {"currency": "currency", "language": "language", "code": "calling code"}
"""What is known of a country: columns of ``countries.tsv``, and what they are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A piece of text that a search can find."""

    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Country:
    """A line of ``countries.tsv``; the name has its article, where it takes one."""

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
        Document(title=f"{asked} of {c.country}", text=f"The {asked} of {c.country} is {getattr(c, attribute)}.")
        for c in countries().values()
        for attribute, asked in ATTRIBUTES.items()
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
