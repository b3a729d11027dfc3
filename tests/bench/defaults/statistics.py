"""Differences between variants over agents and seeds, with 95% intervals. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_core.records.statistics.intervals import MIN_TASKS, Estimate
from tests.bench.bootstrap import expanded_tails
from tests.bench.defaults.results import Row

_RESAMPLES = 10_000
_TAIL = 0.025
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


def pairs(baseline: Sequence[Row], changed: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The runs that differ in their changes alone, and perhaps in their commit, in the order of agents and seeds."""
    others = {_pair(row): row for row in baseline}
    return [(others[_pair(row)], row) for row in sorted(changed, key=_pair) if _pair(row) in others]


def paired(baseline: Sequence[Row], changed: Sequence[Row], figure: Figure) -> dict[str, list[float]]:
    """The differences of ``figure`` in `pairs`, in the order of the seeds, by agent."""
    found: dict[str, list[float]] = defaultdict(list)
    for other, row in pairs(baseline, changed):
        found[row.agent].append(figure(row) - figure(other))
    return dict(found)


def _pair(row: Row) -> tuple[str, str, int, float, str, str, int]:
    return row.suite, row.agent, row.seed, row.minutes, row.basis, row.cpu, row.threads


def over_agents(differences: Differences) -> Estimate:
    """The mean over agents of their mean over seeds, with its interval; the ends are NaN for fewer than `MIN_TASKS` agents.

    A two-stage bootstrap: agents are drawn with replacement, then seeds within each drawn agent (Davison and Hinkley, 1997, "Bootstrap
    Methods and their Application", section 3.8), with the expanded percentiles of `tests.bench.bootstrap` for the number of agents.
    """
    agents = [np.asarray(values, dtype=np.float64) for values in differences.values()]
    if not agents:
        return Estimate(float("nan"), float("nan"), float("nan"))
    mean = float(np.mean([values.mean() for values in agents]))
    if len(agents) < MIN_TASKS:
        return Estimate(mean, float("nan"), float("nan"))
    rng = np.random.default_rng(0)
    count = len(agents)
    # One resampled mean of each agent for each of the places at which it may be drawn.
    means: NDArray[np.float64] = np.stack(
        [values[rng.integers(len(values), size=(_RESAMPLES, count, len(values)))].mean(axis=2) for values in agents]
    )
    drawn = rng.integers(count, size=(_RESAMPLES, count))
    resamples, places = np.indices(drawn.shape)
    low, high = np.quantile(means[drawn, resamples, places].mean(axis=1), expanded_tails(count))
    return Estimate(mean, float(low), float(high))


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
    by_name: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for other, row in pairs(baseline, changed):
        differences = np.asarray(row.after, dtype=np.float64) - np.asarray(other.after, dtype=np.float64)
        # A task that was left out counts as the mean of the others.
        by_name[row.agent].append(np.where(np.isnan(differences), np.nanmean(differences), differences))
    found = [_difference(agent, np.stack(rows)) for agent, rows in by_name.items()]
    return sorted(found, key=lambda difference: difference.mean)


def _difference(agent: str, differences: NDArray[np.float64]) -> AgentDifference:
    """Of ``differences`` [seeds, tasks]: all seeds have the same tasks, so a task is drawn for all of them."""
    seeds, tasks = differences.shape
    rng = np.random.default_rng(0)
    by_seed = rng.multinomial(seeds, [1 / seeds] * seeds, size=_RESAMPLES) / seeds
    by_task = rng.multinomial(tasks, [1 / tasks] * tasks, size=_RESAMPLES) / tasks
    low, high = np.quantile(((by_seed @ differences) * by_task).sum(axis=1), (_TAIL, 1 - _TAIL))
    return AgentDifference(agent=agent, mean=float(differences.mean()), low=float(low), high=float(high), seeds=seeds)
