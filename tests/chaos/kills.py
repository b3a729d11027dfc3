"""Runs that are killed at random points, resumed, and compared with an undisturbed one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tests.chaos.runs import Bench, Difference, Ended


@dataclass(frozen=True, slots=True)
class Kill:
    """The result of a run that was killed."""

    points: tuple[float, ...]
    """When, in CPU seconds of each process that was killed."""
    ended: Ended
    """The end of the last process, which was not killed."""
    difference: Difference | None
    """None if it failed."""

    @property
    def identical(self) -> bool:
        found = self.difference
        return found is not None and found.weights and found.records and not found.lost and not found.doubled


def kill_at_random(bench: Bench, count: int, *, seed: int = 0) -> Iterator[Kill]:
    """``count`` kills, and the results of the runs. Each third run is killed a second time after it was resumed."""
    numbers = random.Random(seed)
    made = 0
    while made < count:
        trial = bench.trial("killed")
        points: list[float] = []
        for _ in range(1 + (made % 3 == 2 and made + 1 < count)):
            at = numbers.uniform(0, bench.seconds)
            trial.when(partial(trial.spent, at))
            points.append(at)
        made += len(points)
        ended = trial.end()
        yield Kill(tuple(points), ended, trial.difference() if ended.code == 0 else None)
