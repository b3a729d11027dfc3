"""Credit against hand-computed numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_core import CreditRules, assign_credit
from lightning_core.errors import CreditError, RewardError
from lightning_core.trace import Reward, check_reward
from tests.credit.episodes import episode


def test_broadcast_gives_every_call_the_return():
    credit = assign_credit([episode("x", 1, "aab"), episode("y", 0)])
    assert [credit.values[c] for c in ("x0", "x1", "x2", "y0")] == [1, 1, 1, 0]


def test_rewards_of_calls_and_agents():
    extra = (Reward(value=0.5, call="x1"), Reward(value=0.25, agent="b"))
    credit = assign_credit([episode("x", 1, "aab", extra=extra), episode("y", 0)])
    assert [credit.values[c] for c in ("x0", "x1", "x2")] == [1.5, 1.5, 1.75]


def test_discounted_reward_to_go():
    """Rewards 0.5 on call 1, 0.25 on agent b's last call (2), 1 at the end (call 3); γ = 0.5, computed backwards."""
    extra = (Reward(value=0.5, call="x1"), Reward(value=0.25, agent="b"))
    credit = assign_credit([episode("x", 1, "aaba", extra=extra)], CreditRules(rewards="discounted", gamma=0.5))
    assert [credit.values[f"x{i}"] for i in range(4)] == [0.5 * 0.875, 0.5 + 0.5 * 0.75, 0.25 + 0.5 * 1, 1]


def test_each_rollout_counts_once_with_any_number_of_calls():
    """Rewards 1 (three calls) and 0 (one call): the mean is 1/2, not 3/4 (arXiv 2608.17528)."""
    credit = assign_credit([episode("x", 1, "aaa"), episode("y", 0)])
    deviation = math.sqrt(((1 - 0.5) ** 2 + (0 - 0.5) ** 2) / 1)
    assert credit.advantages["x0"] == pytest.approx(0.5 / (deviation + 1e-6))
    assert credit.advantages["x0"] == credit.advantages["x1"] == credit.advantages["x2"] == -credit.advantages["y0"]


def test_grpo_against_computed_numbers():
    """Rewards 1, 0, 0, 0: mean 0.25, Bessel-corrected deviation 0.5."""
    credit = assign_credit([episode(r, v) for r, v in zip("wxyz", (1, 0, 0, 0), strict=True)])
    assert credit.advantages["w0"] == pytest.approx(0.75 / (0.5 + 1e-6))
    assert credit.advantages["x0"] == pytest.approx(-0.25 / (0.5 + 1e-6))


def test_rloo_against_computed_numbers():
    """Each against the mean of the others: 1 − 0, 0 − 1/2, 0 − 1/2. It counts rollouts, not calls."""
    credit = assign_credit(
        [episode("x", 1, "aa"), episode("y", 0, "aaa"), episode("z", 0)], CreditRules(advantage="rloo")
    )
    assert credit.advantages["x0"] == credit.advantages["x1"] == pytest.approx(1)
    assert credit.advantages["y2"] == credit.advantages["z0"] == pytest.approx(-0.5)


def test_maxrl_against_computed_numbers():
    """One of four succeeds: the mean is 1/4. With rewards 3 (two calls) and 1 it is 2, since each rollout counts once."""
    rare = [episode(r, v, task="1") for r, v in zip("wxyz", (1, 0, 0, 0), strict=True)]
    graded = [episode("a", 3, "aa", task="2"), episode("b", 1, task="2")]
    credit = assign_credit([*rare, *graded], CreditRules(advantage="maxrl"))
    assert [credit.advantages[f"{r}0"] for r in "wxyz"] == [3, -1, -1, -1]
    assert [credit.advantages[call] for call in ("a0", "a1", "b0")] == [0.5, 0.5, -0.5]


def test_maxrl_refuses_negative_values():
    """Their mean could be 0 or negative. Groups of equal values get 0 as always."""
    rules = CreditRules(advantage="maxrl")
    with pytest.raises(CreditError, match=r"'maxrl' divides by the mean .* 0 or more, but call 'y0' has -0\.5; use"):
        assign_credit([episode("x", 1), episode("y", -0.5)], rules)
    assert set(assign_credit([episode("x", -0.5), episode("y", -0.5)], rules).advantages.values()) == {0.0}


def test_reinforce_plus_plus_baseline_against_computed_numbers():
    """Group means 0.5 and 0.25 are subtracted, then one deviation over all six rollouts."""
    group_1 = [episode("a", 1, task="1"), episode("b", 0, task="1")]
    group_2 = [episode(r, v, task="2") for r, v in zip("cdef", (1, 0, 0, 0), strict=True)]
    credit = assign_credit([*group_1, *group_2], CreditRules(advantage="reinforce++-baseline"))
    centred = [0.5, -0.5, 0.75, -0.25, -0.25, -0.25]
    deviation = math.sqrt(sum(v * v for v in centred) / 5)
    assert [credit.advantages[f"{r}0"] for r in "abcdef"] == pytest.approx([v / (deviation + 1e-6) for v in centred])


@pytest.mark.parametrize("rule", ["grpo", "dr-grpo", "rloo", "maxrl", "reinforce++-baseline"])
def test_single_and_equal_groups_get_nothing_and_are_counted(rule: str):
    episodes = [episode("x", 1, "aa", task="1"), episode("y", 0.3, task="2"), episode("z", 0.3, task="2")]
    credit = assign_credit(episodes, CreditRules(advantage=rule))
    assert set(credit.advantages.values()) == {0.0}
    assert credit.metrics == {"groups": 2, "groups_single": 1, "groups_equal": 1, "groups_wasted": 2}


def test_a_flat_group_of_large_rewards_does_not_hide_the_differences_of_others():
    attempts = [episode(r, v, task=r[0]) for r, v in (("a1", 1e6), ("a2", 1e6), ("b1", 0), ("b2", 0.5))]
    found = assign_credit(attempts, CreditRules(advantage="reinforce++-baseline")).advantages
    deviation = math.sqrt(2 * 0.25**2 / 3)
    assert [found[f"{r}0"] for r in ("a1", "a2", "b1", "b2")] == pytest.approx(
        [0, 0, -0.25 / deviation, 0.25 / deviation], abs=1e-4
    )


def test_groups_that_get_advantages_from_elsewhere_are_not_wasted():
    """Equal within, but compared over the batch, or trained by another component."""
    flat = [episode(r, v, task=r[0]) for r, v in (("a1", 1), ("a2", 1), ("b1", 0), ("b2", 0))]
    credit = assign_credit(flat, CreditRules(advantage="reinforce++"))
    assert (credit.metrics["groups_equal"], credit.metrics["groups_wasted"]) == (2, 0)
    credit = assign_credit(flat, CreditRules(advantage="reinforce++-baseline"))
    assert (credit.metrics["groups_equal"], credit.metrics["groups_wasted"]) == (2, 2)


def test_groups_by_agent_compare_an_agent_with_itself():
    """Agent b is only in rollouts x and y; its baseline is over these (per-agent normalisation, arXiv 2602.08847)."""
    episodes = [episode("x", 1, "ab"), episode("y", 0, "ab"), episode("z", 0, "a")]
    credit = assign_credit(episodes, CreditRules(advantage="rloo", group_by=("task", "agent")))
    assert credit.advantages["x0"] == pytest.approx(1)
    assert credit.advantages["x1"] == pytest.approx(1)
    assert credit.advantages["y1"] == pytest.approx(-1)
    assert credit.advantages["y0"] == pytest.approx(-0.5)


@given(st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(1, 4)), min_size=2, max_size=8), st.integers(2, 5))
def test_more_calls_in_one_rollout_change_no_other_advantage(group: list[tuple[float, int]], more: int):
    for rule in ("grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline"):
        before = assign_credit(
            [episode(f"r{i}-", v, "a" * n) for i, (v, n) in enumerate(group)], CreditRules(advantage=rule)
        )
        grown = [(v, n * more if i == 0 else n) for i, (v, n) in enumerate(group)]
        after = assign_credit(
            [episode(f"r{i}-", v, "a" * n) for i, (v, n) in enumerate(grown)], CreditRules(advantage=rule)
        )
        for call, advantage in before.advantages.items():
            assert after.advantages[call] == pytest.approx(advantage, rel=1e-4, abs=1e-4)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(CreditError, match=r"unknown advantage rule 'gpro'; expected one of .*'grpo'"):
        assign_credit([], CreditRules(advantage="gpro"))
    with pytest.raises(CreditError, match=r"unknown group key 'step'; expected one of .*'turn'"):
        CreditRules(group_by=("step",))
    with pytest.raises(CreditError, match=r"unknown reward rule 'outcome'; expected one of .*'broadcast'.*'gigpo'"):
        CreditRules(rewards="outcome")


def test_rewards_are_finite_numbers():
    assert check_reward(True) == 1.0
    assert check_reward(np.float32(0.5)) == 0.5
    for wrong in (math.nan, math.inf, None, "1"):
        with pytest.raises(RewardError, match="finite number"):
            check_reward(wrong)
