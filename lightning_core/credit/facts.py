"""Facts about all rollouts of a step that rules read, such as which of them share their first calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from lightning_core.credit.episode import Episode, StepFact

F = TypeVar("F", bound=Callable[[Sequence[Episode]], StepFact])
STEP_FACTS: dict[str, Callable[[Sequence[Episode]], StepFact]] = {}
"""Functions that compute a fact from the episodes of a step, by the name that rules read it under."""


def step_fact(name: str) -> Callable[[F], F]:
    """Declare a function whose result is ``episode.facts[name]`` while credit is assigned."""

    def declare(function: F) -> F:
        STEP_FACTS[name] = function
        return function

    return declare


def with_facts(episodes: Sequence[Episode]) -> list[Episode]:
    """``episodes``, each with the facts of all, unless they have facts of more rollouts."""
    if all(STEP_FACTS.keys() <= e.facts.keys() for e in episodes):
        return list(episodes)
    facts = {name: compute(episodes) for name, compute in STEP_FACTS.items()}
    return [replace(e, facts={**e.facts, **facts}) for e in episodes]
