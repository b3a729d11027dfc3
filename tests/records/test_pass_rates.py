"""pass@k and pass^k."""

from __future__ import annotations

from itertools import combinations

import pytest

from lightning_core.records.statistics.pass_rates import pass_rates


def test_the_rates_are_those_of_all_subsets() -> None:
    tasks = {"a": [1.0, 0.0, 1.0, 0.0, 0.0], "b": [1.0] * 5, "c": [0.5] * 5}
    for rate in pass_rates(tasks, solved=1.0):
        subsets = [[[r >= 1.0 for r in s] for s in combinations(rewards, rate.k)] for rewards in tasks.values()]
        shares = [[sum(map(f, own)) / len(own) for own in subsets] for f in (any, all)]
        assert (rate.at_least_one, rate.all) == pytest.approx([sum(s) / 3 for s in shares])


def test_k_goes_up_in_powers_of_two_and_leaves_out_tasks_with_fewer_rollouts() -> None:
    rates = pass_rates({"a": [1.0] * 6, "b": [0.0] * 3}, solved=1.0)
    assert [(r.k, r.tasks, r.all) for r in rates] == [(1, 2, 0.5), (2, 2, 0.5), (4, 1, 1.0), (6, 1, 1.0)]


@pytest.mark.parametrize("rewards", [{}, {"a": [1.0], "b": [0.0]}])
def test_one_rollout_of_each_task_has_no_rates(rewards: dict[str, list[float]]) -> None:
    assert pass_rates(rewards, solved=1.0) == []
