"""Points of a plot of advantages before and after, few enough to draw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lightning_core.tools.runs.recredit import Change

SIZE = 400
"""Width and height of the plot."""
_CELLS = 80
_MARGIN = 0.06


class Dot(NamedTuple):
    """One or more calls at about the same place. ``y`` grows downward, as in SVG."""

    x: float
    y: float
    radius: float
    calls: int


class Scatter(NamedTuple):
    """A square plot, with the same scale on both axes."""

    dots: Sequence[Dot]
    ticks: Sequence[tuple[float, str]]
    """Places on the horizontal axis and their labels. On the vertical axis they are `SIZE` minus that."""
    zero: float
    """The place of 0 on the horizontal axis."""


def make_scatter(changes: Sequence[Change]) -> Scatter:
    """The advantages as trained (x) and with other rules (y), joined on a grid; a dot's area grows with its calls."""
    values = [0.0, *(c.trained.advantage for c in changes), *(c.advantage for c in changes)]
    low, high = min(values), max(values)
    space = (high - low) * _MARGIN or 1.0
    low, high = low - space, high + space

    def place(value: float) -> float:
        return (value - low) / (high - low) * SIZE

    def cell(value: float) -> float:
        return round(place(value) / SIZE * _CELLS) * SIZE / _CELLS

    cells = Counter((cell(c.trained.advantage), cell(c.advantage)) for c in changes)
    most = max(cells.values(), default=1)
    dots = [
        Dot(x=x, y=SIZE - y, radius=2.2 + 5 * math.sqrt((calls - 1) / max(1, most - 1)), calls=calls)
        for (x, y), calls in cells.items()
    ]
    return Scatter(dots=dots, ticks=[(place(t), f"{t:g}") for t in make_ticks(low, high)], zero=place(0))


def make_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most ``most``."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    while (high - low) / step > most:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    first = math.ceil(low / step)
    return [round(n * step, 12) for n in range(first, math.floor(high / step) + 1)]
