"""Differences between variants over agents and seeds, with 95% intervals. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from lightning_core.records.statistics.intervals import Estimate
from tests.bench.bootstrap import over_seeds
from tests.bench.defaults.results import Row

_RESAMPLES = 10_000
_TAIL = 0.025
_EQUAL, _FEW = 0.75, 0.7
MIN_SEEDS = 3
"""Fewest seeds from which an agent is reported as worse."""

Figure = Callable[[Row], float]
Differences = Mapping[str, Sequence[float]]
"""The differences of an agent's paired runs, one for each seed, by agent."""


def reward(row: Row) -> float:
    """The held-out reward after training."""
    return row.reward_after


def solved(row: Row) -> float:
    """The share of held-out tasks that are solved after training."""
    return row.solved_after


def is_settled(row: Row) -> bool:
    """Whether most groups of the run earned the same while it solves few of the held-out tasks."""
    return row.groups_equal >= _EQUAL and row.solved_after < _FEW


def pairs(baseline: Sequence[Row], changed: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The runs that differ in their changes alone, and perhaps in their commit, in the order of agents and seeds."""
    others = {_pair(row): row for row in baseline}
    return [(others[_pair(row)], row) for row in sorted(changed, key=_pair) if _pair(row) in others]


def paired(baseline: Sequence[Row], changed: Sequence[Row], figure: Figure) -> dict[str, list[float]]:
    """The differences of ``figure`` in `pairs`, by agent, one for each seed. A seed that was repeated on another CPU counts once."""
    return {
        agent: [fmean(figure(row) - figure(other) for other, row in same) for same in seeds]
        for agent, seeds in _by_seed(baseline, changed).items()
    }


def _by_seed(baseline: Sequence[Row], changed: Sequence[Row]) -> dict[str, list[list[tuple[Row, Row]]]]:
    """The `pairs` of each agent, together for each seed."""
    found: dict[str, dict[int, list[tuple[Row, Row]]]] = defaultdict(lambda: defaultdict(list))
    for other, row in pairs(baseline, changed):
        found[row.agent][row.seed].append((other, row))
    return {agent: list(seeds.values()) for agent, seeds in found.items()}


def _pair(row: Row) -> tuple[str, str, int, float, str, str, int]:
    return row.suite, row.agent, row.seed, row.minutes, row.basis, row.cpu, row.threads


def over_agents(differences: Differences) -> Estimate:
    """The mean over agents of their mean over seeds, with its interval; the ends are NaN for fewer than six agents.

    Agents are drawn with replacement, each with all of its seeds: their means contain the chance of the seeds already, so that drawing
    seeds again would count it twice (Davison and Hinkley, 1997, "Bootstrap Methods and their Application", section 3.8).
    """
    means = [fmean(values) for values in differences.values()]
    return over_seeds(means) if means else Estimate(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDifference:
    """An agent's mean difference over seeds and held-out tasks."""

    agent: str
    mean: float
    low: float
    high: float
    seeds: int

    @property
    def is_worse(self) -> bool:
        """Whether the whole interval lies below 0, with enough seeds for an interval."""
        return self.seeds >= MIN_SEEDS and self.high < 0


def by_agent(baseline: Sequence[Row], changed: Sequence[Row]) -> list[AgentDifference]:
    """The difference in reward of each agent, worst first, with an interval from resampled seeds and resampled held-out tasks.

    The interval does not expand for the number of seeds: with three, 4 to 10% of agents without a difference are reported.
    """
    found = [
        _difference(agent, np.stack([np.mean([_by_task(*pair) for pair in same], axis=0) for same in seeds]))
        for agent, seeds in _by_seed(baseline, changed).items()
    ]
    return sorted(found, key=lambda difference: difference.mean)


def _by_task(other: Row, row: Row) -> NDArray[np.float64]:
    """The differences of the held-out tasks; a task that was left out counts as the mean of the others."""
    differences = np.asarray(row.after, dtype=np.float64) - np.asarray(other.after, dtype=np.float64)
    return np.where(np.isnan(differences), np.nanmean(differences), differences)


def _difference(agent: str, differences: NDArray[np.float64]) -> AgentDifference:
    """Of ``differences`` [seeds, tasks]: all seeds have the same tasks, so a task is drawn for all of them."""
    seeds, tasks = differences.shape
    rng = np.random.default_rng(0)
    by_seed = rng.multinomial(seeds, [1 / seeds] * seeds, size=_RESAMPLES) / seeds
    by_task = rng.multinomial(tasks, [1 / tasks] * tasks, size=_RESAMPLES) / tasks
    low, high = np.quantile(((by_seed @ differences) * by_task).sum(axis=1), (_TAIL, 1 - _TAIL))
    return AgentDifference(agent=agent, mean=float(differences.mean()), low=float(low), high=float(high), seeds=seeds)
