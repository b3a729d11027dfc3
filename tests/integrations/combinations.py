"""Combinations of parameters: the short form has each value at least once, the long form has all the other combinations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest


def combined(*values: Sequence[Any], where: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """All combinations for ``parametrize``, except those that ``where`` refuses; most are marked as long."""
    places = [p for p in product(*map(range, map(len, values))) if where(*_chosen(values, p))]
    short = _spread(places, len(values))
    return [
        pytest.param(*_chosen(values, place), marks=[] if place in short else [pytest.mark.long]) for place in places
    ]


def _chosen(values: Sequence[Sequence[Any]], place: Sequence[int]) -> list[Any]:
    return [options[index] for options, index in zip(values, place, strict=True)]


def _spread(places: Sequence[tuple[int, ...]], axes: int) -> set[tuple[int, ...]]:
    """Combinations that have each value of each axis, and each as often as the others."""
    chosen: set[tuple[int, ...]] = set()
    used: Counter[tuple[int, int]] = Counter()
    for axis in sorted(range(axes), key=lambda axis: -len({place[axis] for place in places})):
        for value in sorted({place[axis] for place in places}):
            if not used[axis, value]:
                of_value = (place for place in places if place[axis] == value)
                best = min(of_value, key=lambda place: sum(used[pair] for pair in enumerate(place)))
                chosen.add(best)
                used.update(enumerate(best))
    return chosen
