"""Counts of calls and rewards, and the metrics computed from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_core import Call, Episode, Trace
from lightning_core.credit import Credit
from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.rollouts.counts import (
    add_counts,
    count_calls,
    count_rewards,
    count_rollouts,
    counts_to_metrics,
    is_solved,
    seconds_to_metrics,
)
from lightning_core.trace import Reward
from tests.credit.episodes import call, episode


def rollout(*calls: Call, reward: float = 0.0, status: Any = "ok") -> Rollout:
    rewards = (Reward(value=reward),)
    trace = Trace(rollout="r", task_id="t", task={}, calls=calls, events=(), rewards=rewards)
    return Rollout(
        job=Job(task={}, task_id="t", seed=0), trace=trace, status=status, error=None, spans=(), attempt=0, seconds=1.0
    )


def counted(*rollouts: Rollout, **options: Any) -> dict[str, float]:
    counts = {"rows": 1, "rollouts_trained": 1, **count_rollouts(rollouts, **options)}
    return counts_to_metrics(counts)


def test_a_rollout_is_solved_from_a_reward_on() -> None:
    rollouts = [rollout(reward=r) for r in (0.0, 0.7, 0.1 + 0.2, 1.0)]
    assert counted(*rollouts)["solved"] == 0.25
    assert counted(*rollouts, solved=0.3)["solved"] == 0.75
    assert is_solved(0.1 * 3, 0.3)
    assert is_solved(sum([0.1] * 10), 1.0), "0.9999999999999999"
    left_out = rollout(reward=1.0, status="infrastructure")
    assert counted(*rollouts, left_out, lost=2)["solved"] == 0.25, "of the rollouts that have a reward"


def test_the_standard_deviation_is_that_of_all_groups_together() -> None:
    groups = [count_rollouts([rollout(reward=a), rollout(reward=b)]) for a, b in ((0.0, 1.0), (1.0, 3.0))]
    counts = {"rows": 1, "rollouts_trained": 1, **add_counts(*groups)}
    assert counts_to_metrics(counts)["reward_std"] == pytest.approx(np.std([0, 1, 1, 3]))
    assert counted(*[rollout(reward=0.1)] * 3)["reward_std"] == pytest.approx(0, abs=1e-6)


def test_results_after_a_refused_last_request_are_counted_with_their_mean_reward() -> None:
    answered, recovered, other = call("1", "r", "a", 0), call("3", "r", "a", 2), call("4", "r", "b", 3)
    refused = call("2", "r", "a", 1, error="ContextOverflowError: 9 tokens", refused="9 tokens")
    rollouts = [
        rollout(answered, refused, reward=0.25),
        rollout(answered, refused, other, reward=0.0),
        rollout(answered, refused, recovered, reward=1.0),
        rollout(answered, refused, reward=0.5, status="failed"),
    ]
    found = counted(*rollouts)
    assert (found["rollouts_caught_refusal"], found["caught_refusal_reward"]) == (2, 0.125)
    none = counted(rollouts[2])
    assert none["rollouts_caught_refusal"] == 0
    assert "caught_refusal_reward" not in none


def two_policies() -> list[Episode]:
    """One rollout with a call of each policy: one of two tokens that was cut, one of a single token."""
    one = episode("r", 1.0)
    (made,) = one.transitions
    cut = replace(
        made,
        call="cut",
        policy="a",
        output_ids=np.array([1, 2]),
        logprobs=np.array([-1.0, -2.0]),
        finish_reason="length",
    )
    return [replace(one, transitions=[cut, replace(made, call="whole", policy="b", logprobs=np.array([-3.0]))])]


def test_calls_are_counted_for_all_and_for_each_policy() -> None:
    credit = Credit(values={}, advantages={"cut": 0.5, "whole": 0.0})
    counts = count_calls(two_policies(), credit, ["a", "b", "unused"])
    assert (counts["calls"], counts["calls_truncated"], counts["calls_credited"]) == (2, 1, 1)
    assert (counts["a/calls"], counts["b/calls"], counts["unused/calls"]) == (1, 1, 0)
    step = {**count_rollouts([rollout()]), **count_rewards([]), "rows": 1, **counts}
    metrics = counts_to_metrics(add_counts(step, step))
    assert metrics["calls"] == 4
    assert (metrics["response_tokens"], metrics["a/response_tokens"], metrics["b/response_tokens"]) == (1.5, 2, 1)
    assert (metrics["truncated"], metrics["a/truncated"], metrics["b/truncated"]) == (0.5, 1, 0)
    assert (metrics["sampling_entropy"], metrics["a/sampling_entropy"], metrics["b/sampling_entropy"]) == (2, 1.5, 3)
    assert "unused/response_tokens" not in metrics
    assert not [name for name in metrics if "_sum" in name]


def test_what_a_judge_adds_is_a_mean_over_rollouts() -> None:
    given = episode("r", 1.0)
    judged = replace(given, rewards=(*given.rewards, Reward(value=0.5, name="judge")))
    counts = {**count_rollouts([rollout()]), "rows": 1, **count_rewards([judged, given])}
    assert counts_to_metrics(counts)["reward_judge"] == 0.25


def test_sums_of_older_runs_have_fewer_metrics() -> None:
    old = {"reward_sum": 1.0, "rollouts": 2.0, "rollouts_left_out": 0.0, "rows": 2.0}
    assert counts_to_metrics(old) == {"reward": 0.5, "rollouts": 2.0, "rollouts_left_out": 0.0, "rows": 2.0}


def test_tokens_per_second_are_those_of_the_rollouts() -> None:
    found = seconds_to_metrics({"tokens_sampled": 100.0}, rollouts=4.0, update=1.0)
    assert found == {"seconds_rollouts": 4.0, "seconds_update": 1.0, "tokens_per_second": pytest.approx(25)}
