"""Credit against the exact policy gradient of a small MDP.

Two calls with two actions each. The second call sees the first action. The policy is a table of three probabilities (sigmoids of three
parameters). The gradient of the expected return is a sum over four trajectories. The expectation of an estimator is a sum over all groups
of trajectories.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_core import CreditRules, Episode, assign_credit
from lightning_core.trace import Reward
from tests.credit.episodes import call, from_calls

PARAMETERS = np.array([0.3, -0.7, 0.5])
"""Parameters of the first call, and of the second after action 0 and after action 1."""
LAST = np.array([[0.0, 1.0], [0.4, -0.5]])
"""The episode's reward for each pair of actions."""
FIRST = np.array([0.2, 0.0])
"""Reward of the first call for its action."""
TRAJECTORIES = list(itertools.product((0, 1), (0, 1)))


def chances(state: int) -> NDArray[np.float64]:
    one = 1 / (1 + math.exp(-PARAMETERS[state]))
    return np.array([1 - one, one])


def probability(trajectory: tuple[int, int]) -> float:
    first, second = trajectory
    return float(chances(0)[first] * chances(1 + first)[second])


def scores(trajectory: tuple[int, int]) -> list[NDArray[np.float64]]:
    """∇ log π of each of the two calls."""
    first, second = trajectory
    found = [np.zeros(3), np.zeros(3)]
    found[0][0] = first - chances(0)[1]
    found[1][1 + first] = second - chances(1 + first)[1]
    return found


def value(trajectory: tuple[int, int]) -> float:
    return float(FIRST[trajectory[0]] + LAST[trajectory])


def exact() -> NDArray[np.float64]:
    return sum((probability(t) * value(t) * sum(scores(t), np.zeros(3)) for t in TRAJECTORIES), np.zeros(3))


def expected_rest() -> dict[int, tuple[float, float]]:
    """The true values at both calls, by first action."""
    second = [float(chances(1 + a) @ LAST[a]) for a in (0, 1)]
    start = float(chances(0) @ (FIRST + np.array(second)))
    return {a: (start, second[a]) for a in (0, 1)}


def episode(name: str, trajectory: tuple[int, int]) -> Episode:
    first, _ = trajectory
    seen = ({"role": "assistant", "content": str(first)}, {"role": "tool", "content": f"after {first}"})
    calls = [call(f"{name}0", name, "a", 0), call(f"{name}1", name, "a", 1, messages=seen)]
    return from_calls(calls, float(LAST[trajectory]), extra=[Reward(value=float(FIRST[first]), call=f"{name}0")])


def expectation(rules: CreditRules, n: int) -> NDArray[np.float64]:
    """Expectation of the mean over a group's rollouts of Σ_t A_t ∇ log π, over all groups of ``n``."""
    total = np.zeros(3)
    for group in itertools.product(TRAJECTORIES, repeat=n):
        episodes = [episode(f"r{i}-", t) for i, t in enumerate(group)]
        values: dict[str, float] = {}
        for i, (first, _) in enumerate(group):
            values |= zip((f"r{i}-0", f"r{i}-1"), expected_rest()[first], strict=True)
        advantages: Mapping[str, float] = assign_credit(episodes, rules, values=values).advantages
        estimate = np.zeros(3)
        for i, trajectory in enumerate(group):
            for turn, score in enumerate(scores(trajectory)):
                estimate += advantages[f"r{i}-{turn}"] * score / n
        total += math.prod(probability(t) for t in group) * estimate
    return total


@pytest.mark.parametrize(
    "rules",
    [
        CreditRules(advantage="none"),
        CreditRules(advantage="rloo"),
        CreditRules(rewards="discounted", advantage="none"),
        CreditRules(rewards="gae", advantage="none", lam=1.0),
        CreditRules(rewards="gae", advantage="none", lam=0.0),
        CreditRules(rewards="gae", advantage="none", lam=0.5),
    ],
    ids=lambda r: f"{r.rewards} {r.advantage} {r.lam}",
)
def test_estimators_without_bias(rules: CreditRules):
    """With γ = 1 and, for GAE, the true values."""
    np.testing.assert_allclose(expectation(rules, 2), exact(), atol=1e-12)


def test_rloo_per_turn_has_no_bias_where_turns_are_always_there():
    rules = CreditRules(rewards="discounted", advantage="rloo", group_by=("task", "agent", "turn"))
    np.testing.assert_allclose(expectation(rules, 3), exact(), atol=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_subtracting_the_groups_own_mean_shrinks_the_gradient(n: int):
    """Dr. GRPO's baseline includes the rollout itself: (n − 1)/n of the gradient, in the same direction."""
    np.testing.assert_allclose(expectation(CreditRules(advantage="dr-grpo"), n), (n - 1) / n * exact(), atol=1e-12)


def test_a_reward_at_the_last_call_alone_is_another_gradient():
    """The first call gets no reward for what follows from its action."""
    found = expectation(CreditRules(rewards="last-call", advantage="none"), 2)
    np.testing.assert_allclose(found[1:], exact()[1:], atol=1e-12)
    assert abs(found[0] - exact()[0]) > 0.01


@pytest.mark.parametrize(
    "rules", [CreditRules(), CreditRules(rewards="gigpo", advantage="dr-grpo")], ids=["grpo", "gigpo"]
)
def test_the_others_point_the_same_way(rules: CreditRules):
    """Dividing by the group's deviation, and comparing steps per position, change lengths more than directions."""
    found, true = expectation(rules, 3), exact()
    assert found @ true / np.linalg.norm(found) / np.linalg.norm(true) > 0.97
