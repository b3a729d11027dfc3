"""The rules that use the probability of the answer, against hand-computed numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lightning_core import CreditRules, Episode, assign_credit
from lightning_core.credit import Component, RewardTerm, assign_by_policy
from lightning_core.credit.episode import Accumulate
from lightning_core.credit.explain import explain_credit
from lightning_core.signals.information_gain.gains import ANSWER_LOGPROBS, information_gains
from lightning_core.trace import Event, Reward
from tests.credit.episodes import call, event, from_calls

A_TOKENS = 3


def attempt(
    name: str,
    reward: float,
    scores: list[float | None],
    agents: str = "",
    *,
    events: tuple[Event, ...] = (),
    changes: tuple[dict[str, Any], ...] = (),
    extra: tuple[Reward, ...] = (),
    task: str = "t",
) -> Episode:
    """Calls NAME0, NAME1, …, before each of which the answer has the probability in ``scores``. ``changes``: differences of the calls."""
    calls = [
        call(
            f"{name}{i}",
            name,
            (agents or "a" * len(scores))[i],
            i,
            arrays={} if p is None else {ANSWER_LOGPROBS: np.full(A_TOKENS, math.log(p), dtype="<f4")},
            **(changes[i] if changes else {}),
        )
        for i, p in enumerate(scores)
    ]
    return from_calls(calls, reward, events=events, extra=extra, task=task)


def gains(one: Episode, **arguments: Any) -> list[Any]:
    both: dict[str, Any] = {"measure": "probability", "after": "agent", **arguments}
    found = information_gains(one, **both)
    return [None if gain is None else pytest.approx(gain, abs=1e-6) for gain in found]


def test_a_call_gains_what_the_next_prompt_adds():
    assert gains(attempt("x", 1, [0.1, 0.4, 0.3])) == [0.3, -0.1, None]


def test_the_probability_is_the_geometric_mean_over_the_answers_tokens():
    one = attempt("x", 1, [0.1, 0.4])
    uneven = call("x1", "x", "a", 1, arrays={ANSWER_LOGPROBS: np.log(np.array([0.5, 0.08], dtype="<f4"))})
    one = from_calls([one.trace.calls[0], uneven], 1)
    assert gains(one) == [0.2 - 0.1, None], "the root of 0.5 · 0.08 is 0.2"
    assert gains(one, measure="log-probability") == [math.log(0.2 / 0.1), None]


def test_the_next_call_is_that_of_the_same_agent_or_policy():
    one = attempt("x", 1, [0.1, 0.2, 0.5, 0.9], "abab")
    assert gains(one) == [0.4, 0.7, None, None]
    assert gains(one, after="policy") == [0.1, 0.3, 0.4, None]
    other = attempt("x", 1, [0.1, 0.2, 0.5], changes=({}, {"model": "other"}, {}))
    assert gains(other, after="policy") == [0.4, None, None], "models are not compared with each other"


def test_a_call_that_was_not_scored_leaves_no_gain_around_it():
    assert gains(attempt("x", 1, [0.1, None, 0.5, 0.6])) == [None, None, 0.1, None]


def test_a_call_in_a_parallel_branch_is_not_the_next_one():
    """Branches p (calls 0 and 2) and q (1 and 3) overlap; call 4 joins them."""
    branches = (event("p", "node", 0, 4), event("q", "node", 0.5, 4))
    changes = tuple({"parent": parent} for parent in ("p", "q", "p", "q", "root"))
    one = attempt("x", 1, [0.1, 0.2, 0.5, 0.6, 0.9], events=branches, changes=changes)
    assert gains(one) == [0.4, 0.4, 0.4, 0.3, None]


def test_calls_that_overlap_share_the_call_that_joins_them():
    """Without spans of their own, as in threads."""
    changes = ({"end_ns": 2 * 10**9}, {"start_ns": 0}, {})
    assert gains(attempt("x", 1, [0.1, 0.2, 0.6], changes=changes)) == [0.5, 0.4, None]


def group() -> list[Episode]:
    """Equal rewards: the gains alone make a difference."""
    return [attempt("x", 0, [0.1, 0.5, 0.4]), attempt("y", 0, [0.1, 0.1])]


def test_igpo_compares_gains_and_rewards_together_and_then_sums_them():
    """x: 0.4, −0.1, 0, each of weight 1/3; y: 0, 0. Mean (0.1 + 0) / 2 = 0.05.

    The rollouts' means of squares are (0.35² + 0.15² + 0.05²) / 3 = 0.049167 and 0.05² = 0.0025, so σ² = 0.051667.
    """
    found = assign_credit(group(), CreditRules(rewards="igpo", gamma=0.5))
    deviation = math.sqrt((0.35**2 + 0.15**2 + 0.05**2) / 3 + 0.05**2)
    x2, x1, x0 = (-0.05 / deviation, (-0.15 - 0.025) / deviation, (0.35 - 0.075 - 0.0125) / deviation)
    y1, y0 = -0.05 / deviation, (-0.05 - 0.025) / deviation
    expected = {"x0": x0, "x1": x1, "x2": x2, "y0": y0, "y1": y1}
    assert found.advantages == pytest.approx(expected, abs=1e-4)
    assert found.values == pytest.approx({"x0": 0.4, "x1": -0.1, "x2": 0, "y0": 0, "y1": 0}, abs=1e-6)


def test_rewards_of_calls_and_agents_are_added_to_the_gain():
    """The episode's reward counts at the last call, that of agent b at its own."""
    extra = (Reward(value=0.25, call="x0"), Reward(value=0.0, agent="b"))
    one = attempt("x", 1, [0.1, 0.3, 0.2], "aba", extra=extra)
    assert assign_credit([one], CreditRules(rewards="igpo")).values == pytest.approx({"x0": 0.35, "x1": 0, "x2": 1})
    explained = explain_credit([one, attempt("y", 0, [None])], {"policy": CreditRules(rewards="igpo")})
    assert [m.call for m in explained["x1"].groups[0].members] == ["x0", "x1", "x2", "y0"], (
        "also a reward of 0 is compared"
    )


def test_a_call_without_gain_and_reward_is_not_compared():
    """Agent b speaks once, before the end: it has the sum of what follows, 0.5 − 0.25."""
    episodes = [attempt("x", 1, [0.1, 0.3, 0.1], "aba"), attempt("y", 0.5, [None])]
    found = assign_credit(episodes, CreditRules(rewards="igpo", advantage="dr-grpo"))
    mean = ((0.0 + 1.0) / 2 + 0.5) / 2
    expected = {"x0": 0 - mean + 1 - mean, "x1": 1 - mean, "x2": 1 - mean, "y0": 0.5 - mean}
    assert found.advantages == pytest.approx(expected, abs=1e-6)
    explained = explain_credit(episodes, {"policy": CreditRules(rewards="igpo", advantage="dr-grpo")})
    assert explained["x1"].groups == []
    assert explained["x1"].accumulated == pytest.approx(1 - mean)
    assert {c: e.advantage for c, e in explained.items()} == pytest.approx(expected, abs=1e-6)


def test_a_task_without_an_answer_has_the_credit_of_its_rewards():
    episodes = [attempt("x", 1, [None, None]), attempt("y", 0, [None, None])]
    found = assign_credit(episodes, CreditRules(rewards="igpo", advantage="dr-grpo"))
    assert found.advantages == {"x0": 0.5, "x1": 0.5, "y0": -0.5, "y1": -0.5}


def test_gains_are_compared_once_with_the_terms_of_a_judge():
    term = RewardTerm(name="judge_short")
    episodes = [
        attempt("x", 0, [0.1, 0.5], extra=(Reward(value=1.0, name="judge_short"),)),
        attempt("y", 0, [0.1, 0.1], extra=(Reward(value=0.0, name="judge_short"),)),
    ]
    rules = CreditRules(rewards="igpo", advantage="dr-grpo", terms=[term])
    found = assign_credit(episodes, rules).advantages
    assert found == pytest.approx(
        {"x0": 0.2 + 0.5, "x1": -0.1 + 0.5 + 0.0, "y0": -0.2 - 0.5, "y1": -0.1 - 0.5}, abs=1e-6
    )


def test_each_policy_has_the_gains_of_its_own_calls():
    calls = [
        call(f"x{i}", "x", agent, i, model=agent.upper(), arrays={ANSWER_LOGPROBS: np.log(np.array([p], dtype="<f4"))})
        for i, (agent, p) in enumerate([("a", 0.1), ("b", 0.9), ("a", 0.3), ("b", 0.2)])
    ]
    episodes = [from_calls(calls, 0), from_calls([call("y0", "y", "a", 0, model="A")], 0)]
    rules = dict.fromkeys("AB", CreditRules(rewards="igpo", advantage="none"))
    found = assign_by_policy(episodes, rules).advantages
    assert found == pytest.approx({"x0": 0.2, "x1": -0.7, "x2": 0, "x3": 0, "y0": 0}, abs=1e-6)


def test_accumulation_counts_compared_calls_only():
    assert Accumulate(gamma=0.5)([1.0, None, 2.0]) == [1.5, 1.0, 2.0]
    assert Accumulate(gamma=1.0, rescale=True)([1.0, None, 1.0, None]) == pytest.approx([2**0.5, 1.0, 1.0, 0.0])
    assert Component(values=[None, 1.0]).accumulate is None
