"""Curves from a store: the error of training rewards, and held-out rewards with intervals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lightning_core.records.statistics.intervals import confidence_interval
from lightning_core.records.store import Phase, Store
from lightning_core.tools.runs.curves import held_out_curve, training_errors
from tests.records.test_store import record


def add(store: Store, phase: Phase, step: int, rewards: dict[str, list[float | None]], **changes: Any) -> None:
    for task, values in rewards.items():
        for reward in values:
            identity = f"{store.count():032x}"
            made = record(identity, phase=phase, step=step, task_id=task, reward=reward, **changes)
            store.add_rollout(made, [])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.db")


def test_the_error_of_a_step_is_that_of_the_mean_over_tasks(store: Store) -> None:
    add(store, "train", 1, {"a": [0, 1], "b": [1, 1], "c": [0, 0]})
    add(store, "train", 2, {"a": [0, 1]})
    add(store, "train", 3, {"a": [1], "b": [1]})
    add(store, "eval", 2, {"a": [0], "b": [9]})
    # Means of tasks 0.5, 1, 0: standard deviation 0.5, of the mean 0.5 / √3.
    expected = {1: pytest.approx(0.5 / math.sqrt(3)), 3: 0}
    assert training_errors(store) == expected
    assert training_errors(store, after=1) == {3: 0}


def test_rollouts_that_were_left_out_are_left_out(store: Store) -> None:
    add(store, "train", 1, {"a": [1], "b": [1]})
    add(store, "train", 1, {"a": [None], "c": [None]}, status="infrastructure")
    add(store, "eval", 0, {"a": [None]}, status="invalid")
    assert training_errors(store) == {1: 0}
    assert held_out_curve(store) == {}


def test_held_out_rewards_have_the_interval_of_their_tasks(store: Store) -> None:
    add(store, "eval_before", 0, {f"t{n}": [n / 8, n / 8] for n in range(8)})
    add(store, "eval", 4, {"t0": [0], "t1": [1]})
    add(store, "eval_after", 4, {"t0": [1], "t1": [1]})
    add(store, "eval_unfinished", 9, {"t0": [1]})
    add(store, "eval_manual", 9, {"t0": [1]})
    found = held_out_curve(store)
    assert list(found) == [0, 4]
    assert found[0] == confidence_interval([n / 8 for n in range(8)])
    assert found[4].mean == 1, "the last evaluation of a step"


def test_a_failed_rollout_without_a_reward_counts_as_zero(store: Store) -> None:
    add(store, "eval", 1, {"a": [1], "b": [1]})
    add(store, "eval", 1, {"c": [None], "d": [None]}, status="failed")
    assert held_out_curve(store)[1].mean == 0.5
