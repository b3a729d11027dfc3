"""Findings, and the tables of checks that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

Level = Literal["ok", "info", "warning", "problem"]
"""``warning``: training works, but perhaps not as intended. ``problem``: it stops, or learns nothing."""
E = TypeVar("E")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    section: str
    """The subject of the check, such as ``environment``."""
    name: str
    """The check's name in docs/doctor.md."""
    level: Level
    found: str
    advice: str = ""
    """The advice; empty if there is nothing to do, or if ``found`` has it."""


class Observed(NamedTuple):
    """A finding without its section and name."""

    level: Level
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check(Generic[E]):
    """A check of evidence of one type. The function's docstring is its documentation."""

    name: str
    find: Callable[[E], Iterable[Observed]]


class Checks(Generic[E]):
    """The checks of one type of evidence, in the order in which they are reported."""

    def __init__(self, title: str) -> None:
        """``title``: of their table in docs/doctor.md."""
        self.title = title
        self.all: list[Check[E]] = []

    def check(self, name: str) -> Callable[[Callable[[E], Iterable[Observed]]], Callable[[E], Iterable[Observed]]]:
        """Add the decorated function under ``name``."""

        def add(function: Callable[[E], Iterable[Observed]]) -> Callable[[E], Iterable[Observed]]:
            self.all.append(Check(name, function))
            return function

        return add

    def examine(self, section: str, evidence: E) -> Iterator[Finding]:
        """The findings of all checks."""
        for check in self.all:
            for level, text, advice in check.find(evidence):
                yield Finding(section=section, name=check.name, level=level, found=text, advice=advice)
