"""Intervals of mean rewards, and the comparison of two evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_core.records.statistics.intervals import (
    MIN_TASKS,
    Estimate,
    compare,
    compare_splits,
    confidence_interval,
    paired_improvement,
)

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
DISTRIBUTIONS: dict[str, tuple[float, Draw]] = {
    "rare": (0.07, lambda g, n: g.random(n) < 0.07),
    "binary": (0.4, lambda g, n: g.random(n) < 0.4),
    "nearly solved": (0.95, lambda g, n: g.random(n) < 0.95),
    "partial": (0.3, lambda g, n: g.beta(0.6, 1.4, n)),
    "ties": (0.12, lambda g, n: g.choice([0.0, 0.25, 0.5, 1.0], n, p=[0.8, 0.04, 0.1, 0.06])),
    "penalties": (0.125, lambda g, n: g.choice([0.25, -1.0], n, p=[0.9, 0.1])),
}
"""The mean and samples of rewards, by name."""


@pytest.mark.parametrize(
    "count", [6, pytest.param(8, marks=pytest.mark.long), pytest.param(12, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_intervals_of_few_tasks_cover_the_mean(name: str, count: int) -> None:
    mean, draw = DISTRIBUTIONS[name]
    generator = np.random.default_rng(1)
    samples = [draw(generator, count).astype(float).tolist() for _ in range(100)]
    if name == "penalties":  # the first evaluation shows the range
        pairs = [([1.0] * count, [1.0 + value for value in sample]) for sample in samples]
    else:
        pairs = [([0.0] * count, sample) for sample in samples]
        assert _covered([confidence_interval(sample) for sample in samples], mean) >= 95
    assert _covered([paired_improvement(*pair) for pair in pairs], mean) >= 95


def _covered(estimates: list[Estimate], mean: float) -> int:
    return sum(e.low <= mean <= e.high for e in estimates)


def test_the_interval_of_binary_rewards_is_that_of_clopper_and_pearson() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 5: 81 of 263 and 15 of 148.
    estimate = confidence_interval([1.0] * 81 + [0.0] * 182)
    assert estimate == pytest.approx((0.3080, 0.2527, 0.3676), abs=2e-3)
    assert confidence_interval([1.0] * 15 + [0.0] * 133) == pytest.approx((0.1014, 0.0578, 0.1617), abs=2e-3)
    # 1 - 0.025^(1/n), and its counterpart.
    assert confidence_interval([0.0] * 20) == pytest.approx((0.0, 0.0, 0.1684), abs=1e-3)
    assert confidence_interval([1.0]) == pytest.approx((1.0, 0.025, 1.0), abs=1e-3)


def test_intervals_do_not_depend_on_the_order_of_tasks() -> None:
    before = {f"t{i}": [0.1 * (i % 7), 0.3] for i in range(23)}
    after = {task: [1 / (3 + i)] for i, task in enumerate(before)}
    order = np.random.default_rng(0).permutation(list(before)).tolist()
    shuffled = {task: before[task] for task in order}, {task: after[task] for task in reversed(order)}
    assert compare(before, after) == compare(*shuffled)


def test_with_many_tasks_the_interval_is_nearly_students() -> None:
    values = np.random.default_rng(1).normal(0.5, 0.1, size=300)
    mean, low, high = confidence_interval(values.tolist())
    half = 1.968 * values.std(ddof=1) / math.sqrt(300)
    assert mean == pytest.approx(values.mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.4 * half)


def test_paired_is_narrower_than_unpaired_when_tasks_differ() -> None:
    before = [0.8 * (i % 2) for i in range(100)]
    after = [reward + 0.1 + 0.01 * (i % 3) for i, reward in enumerate(before)]
    gain, alone = paired_improvement(before, after), confidence_interval(after)
    assert gain.mean == pytest.approx(0.1099)
    assert 0 < gain.low < gain.high
    assert gain.high - gain.low < alone.high - alone.low


def test_too_few_tasks_give_no_interval_of_an_improvement() -> None:
    assert paired_improvement([0.0] * (MIN_TASKS - 1), [1.0] * (MIN_TASKS - 1)).interval is None
    interval = paired_improvement([0.0] * MIN_TASKS, [1.0] * MIN_TASKS).interval
    assert interval == pytest.approx((0.081, 1.0), abs=1e-3), "the fewest tasks that can show an improvement"


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, 1.0]])
def test_refused_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        confidence_interval(values)


def test_compare_uses_the_tasks_that_both_have() -> None:
    before = {f"t{i}": [0.0, 1.0] for i in range(12)} | {"lost": [], "gone": [1.0]}
    after = {f"t{i}": [1.0, 1.0] for i in range(12)} | {"lost": [1.0]}
    result = compare(before, after)
    assert result.tasks == 12
    assert (result.eval_reward_before, result.eval_reward_after, result.improvement) == (0.5, 1.0, 0.5)
    assert result.improved
    assert result.eval_ci95_after is not None
    assert result.eval_ci95_after[0] == pytest.approx(0.025 ** (1 / 12), abs=1e-3)
    with pytest.raises(ValueError, match="no task has a reward both before"):
        compare({"a": [1.0]}, {"b": [1.0]})


def test_compare_splits() -> None:
    before = {"a": [0.0], "b": [1.0], "c": [0.0]}
    after = {"a": [1.0], "b": [1.0]}
    found = compare_splits(before, after, {"a": "easy", "b": "hard", "c": "none"})
    assert {name: (c.tasks, c.improvement) for name, c in found.items()} == {"easy": (1, 1.0), "hard": (1, 0.0)}
