"""Each reward rule, group key and advantage rule against hand-computed numbers."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_core import CreditRules, Episode, assign_credit
from lightning_core.credit.gae import turn_gae
from lightning_core.errors import CreditError, RewardError
from lightning_core.trace import Reward
from tests.credit.episodes import call, episode, from_calls

FLAT = episode("y", 0)


def values(one: Episode, rules: CreditRules) -> list[float]:
    """Values of ``one``'s calls."""
    credit = assign_credit([one, FLAT], rules)
    return [credit.values[t.call] for t in one.transitions]


EXTRA = (Reward(value=0.5, call="x1"), Reward(value=0.25, agent="b"))
"""Rewards on the second call, and on agent b, whose calls are the third and fourth of ``aabba``."""


def test_last_call():
    assert values(episode("x", 1, "aabba", extra=EXTRA), CreditRules(rewards="last-call")) == [0, 0.5, 0, 0.25, 1]


def test_explicit():
    assert values(episode("x", 1, "aabba", extra=EXTRA), CreditRules(rewards="explicit")) == [0, 0.5, 0.25, 0.25, 0]


def test_the_reward_of_a_call_that_is_not_trained_reaches_the_trained_call_before_it():
    calls = [call(f"x{i}", "x", agent, i) for i, agent in enumerate("baba")]
    one = from_calls(calls, 1, extra=(Reward(value=0.5, call="x2"), Reward(value=0.25, call="x0")), trained="a")
    rules = CreditRules(rewards="discounted", gamma=0.5)
    assert values(one, rules) == [0.5 + 0.25 + 0.5 * 1, 1], "x2's reward counts at x1, x0's at the first call"


def test_a_rule_of_ones_own():
    def shortest(one: Episode, gamma: float) -> list[float]:
        return [one.reward * gamma / len(one.transitions)] * len(one.transitions)

    assert values(episode("x", 1, "aab"), CreditRules(rewards=shortest, gamma=0.5)) == [1 / 6] * 3
    with pytest.raises(CreditError, match=r"<lambda> returned 1 values for the 3 calls"):
        assign_credit([episode("x", 1, "aab")], CreditRules(rewards=lambda e, g: [1.0]))
    with pytest.raises(RewardError, match="finite"):
        assign_credit([FLAT], CreditRules(rewards=lambda e, g: [math.nan]))


def test_turn_gae_against_computed_numbers():
    """r = 0, 0, 1; V = 0.5, 0.4, 0.8; γ = 0.9, λ = 0.5, computed backwards."""
    d2, d1, d0 = 1 - 0.8, 0.9 * 0.8 - 0.4, 0.9 * 0.4 - 0.5
    a2 = d2
    a1 = d1 + 0.45 * a2
    a0 = d0 + 0.45 * a1
    advantages, targets = turn_gae([0, 0, 1], [0.5, 0.4, 0.8], gamma=0.9, lam=0.5)
    assert advantages == pytest.approx([a0, a1, a2])
    assert targets == pytest.approx([a0 + 0.5, a1 + 0.4, a2 + 0.8])


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=6), st.floats(0.1, 1))
def test_turn_gae_at_the_ends_of_lambda(turns: list[tuple[float, float]], gamma: float):
    """λ = 1: reward-to-go minus V. λ = 0: one step ahead. A turn without a reward is a turn."""
    rewards, expected = zip(*turns, strict=True)
    far, _ = turn_gae(rewards, expected, gamma=gamma, lam=1)
    near, _ = turn_gae(rewards, expected, gamma=gamma, lam=0)
    for t, (reward, value) in enumerate(turns):
        to_go = sum(gamma ** (k - t) * rewards[k] for k in range(t, len(turns)))
        assert far[t] == pytest.approx(to_go - value)
        assert near[t] == pytest.approx(reward + gamma * (expected[t + 1] if t + 1 < len(turns) else 0) - value)


def test_gae_uses_the_critic_and_returns_its_targets():
    rules = CreditRules(rewards="gae", gamma=1.0, lam=1.0, advantage="none")
    expected = {"x0": 0.5, "x1": 0.25, "y0": 0.5}
    credit = assign_credit([episode("x", 1, "aa"), FLAT], rules, values=expected)
    assert dict(credit.advantages) == {"x0": 0.5, "x1": 0.75, "y0": -0.5}
    assert dict(credit.targets) == {"x0": 1, "x1": 1, "y0": 0}
    with pytest.raises(CreditError, match="call 'x1' has no value"):
        assign_credit([episode("x", 1, "aa")], rules, values={"x0": 0.5})


def news(text: str) -> tuple[dict[str, str], ...]:
    return (
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "…"},
        {"role": "tool", "content": text},
    )


def test_gigpo_against_computed_numbers():
    """Both rollouts start at the same question and get the same page next; ω = 2, γ = 0.5.

    Episode: returns 1 and 0, so ±0.5 (dr-grpo). Steps: from the question 0.5 against 0, from the page 1 against 0. Only x
    reached the observation of its last call.
    """
    x = [
        call("x0", "x", "a", 0),
        call("x1", "x", "a", 1, messages=news("page")),
        call("x2", "x", "a", 2, messages=news("own")),
    ]
    y = [call("y0", "y", "a", 0), call("y1", "y", "a", 1, messages=news("page"))]
    episodes = [from_calls(x, 1), from_calls(y, 0)]
    rules = CreditRules(rewards="gigpo", gamma=0.5, step_weight=2.0, advantage="dr-grpo")
    credit = assign_credit(episodes, rules)
    assert dict(credit.advantages) == pytest.approx(
        {"x0": 0.5 + 2 * 0.125, "y0": -0.5 - 2 * 0.125, "x1": 0.5 + 2 * 0.25, "y1": -0.5 - 2 * 0.25, "x2": 0.5}
    )
    assert (credit.metrics["groups"], credit.metrics["step_groups"], credit.metrics["step_groups_single"]) == (1, 3, 1)


def test_anchors_may_disregard_case_and_white_space():
    x = [call("x0", "x", "a", 0, messages=news("The  Page\n"))]
    y = [call("y0", "y", "a", 0, messages=news("the page "))]
    episodes = [from_calls(x, 1), from_calls(y, 0)]
    for key, groups in (("anchor", 2), ("anchor-normalised", 1)):
        assert assign_credit(episodes, CreditRules(group_by=("task", key))).metrics["groups"] == groups


def test_the_same_news_to_another_agent_is_another_anchor():
    episodes = [episode("x", 1, "a"), episode("y", 0, "b")]
    assert assign_credit(episodes, CreditRules(group_by=("anchor",))).metrics["groups"] == 2


def test_groups_by_turn_compare_the_same_turn_of_the_same_agent():
    """AT-GRPO (arXiv 2510.11062). Agent a has a second turn only in x."""
    episodes = [episode("x", 1, "aba"), episode("y", 0, "ab")]
    rules = CreditRules(advantage="rloo", group_by=("task", "agent", "turn"))
    assert dict(assign_credit(episodes, rules).advantages) == {"x0": 1, "y0": -1, "x1": 1, "y1": -1, "x2": 0}


def test_dr_grpo_and_none_against_computed_numbers():
    episodes = [episode(r, v) for r, v in zip("wxyz", (1, 0, 0, 0), strict=True)]
    dr = assign_credit(episodes, CreditRules(advantage="dr-grpo")).advantages
    assert [dr["w0"], dr["x0"]] == [0.75, -0.25]
    plain = assign_credit(episodes, CreditRules(advantage="none")).advantages
    assert [plain["w0"], plain["x0"]] == [1, 0]


def test_reinforce_plus_plus_needs_no_groups():
    """Four tasks with one rollout each; mean 0.25, deviation 0.5 over rollouts, though w has three calls."""
    episodes = [episode(r, v, "aaa" if r == "w" else "a", task=r) for r, v in zip("wxyz", (1, 0, 0, 0), strict=True)]
    found = assign_credit(episodes, CreditRules(advantage="reinforce++")).advantages
    assert [found["w0"], found["w2"], found["x0"]] == pytest.approx(
        [0.75 / 0.500001, 0.75 / 0.500001, -0.25 / 0.500001]
    )


def test_whitening_counts_a_rollout_once_however_many_groups_it_is_in():
    """x is in two groups, y and z in one. Over the batch each has weight 1."""
    episodes = [episode("x", 1, "ab"), episode("y", 0, "a"), episode("z", 0.5, "b")]
    found = assign_credit(episodes, CreditRules(advantage="reinforce++-baseline", group_by=("agent",))).advantages
    centred = {"x0": 0.5, "x1": 0.25, "y0": -0.5, "z0": -0.25}
    mean = (0.375 - 0.5 - 0.25) / 3
    square = 0.5 * (0.5 - mean) ** 2 + 0.5 * (0.25 - mean) ** 2 + (-0.5 - mean) ** 2 + (-0.25 - mean) ** 2
    deviation = math.sqrt(square / 2)
    assert dict(found) == pytest.approx({c: (v - mean) / (deviation + 1e-6) for c, v in centred.items()})


def test_a_rule_of_ones_own_that_fails_is_an_error_with_its_place():
    def divided(episode: Episode) -> list[float]:
        return [1 / 0] * len(episode.transitions)

    with pytest.raises(
        CreditError,
        match=r"the function 'divided' failed:\n  .*test_credit_rules.py:\d+, in divided: .*\n  ZeroDivisionError",
    ):
        assign_credit([episode("x", 1)], CreditRules(rewards=divided))

    def ends_in_a_library(episode: Episode, gamma: float) -> list[float]:
        return [float(np.stack([]).sum())]

    with pytest.raises(
        CreditError, match=r"'ends_in_a_library' failed:\n  .*in ends_in_a_library: .*\n  ValueError: need"
    ):
        assign_credit([episode("x", 1)], CreditRules(rewards=ends_in_a_library))

    def ends_the_process(episode: Episode) -> list[float]:
        sys.exit(3)

    with pytest.raises(CreditError, match=r"'ends_the_process' failed:\n  .*in ends_the_process: .*\n  SystemExit: 3"):
        assign_credit([episode("x", 1)], CreditRules(rewards=ends_the_process))


def test_a_rule_of_ones_own_without_values_is_an_error():
    with pytest.raises(CreditError, match="the reward rule 'nothing' returned None; expected one value per call"):
        assign_credit([episode("x", 1)], CreditRules(rewards=nothing))


def nothing(episode: Episode) -> None:
    """A rule that forgets to return."""
