"""Rewards that are compared on their own, such as the criteria of a judge, against computed numbers."""

from __future__ import annotations

import math

import pytest

from lightning_core import CreditRules, Episode, assign_credit
from lightning_core.credit import ADVANTAGE_RULES, REWARD_RULES, RewardTerm, assign_by_policy
from lightning_core.credit.advantage_rules import EPSILON
from lightning_core.credit.explain import explain_credit
from lightning_core.errors import CreditError
from lightning_core.trace import Reward
from tests.credit.episodes import episode

RIGHT = RewardTerm(name="right")
SHORT = RewardTerm(name="short", weight=0.5)


def scored(rollout: str, right: float, short: float, agents: str = "a", *, reward: float = 0.0) -> Episode:
    extra = (Reward(value=right, name="right"), Reward(value=short, name="short"))
    return episode(rollout, reward, agents, extra=extra)


PAIRS = [scored("w", 1.0, 0.1), scored("x", 1.0, 0.0), scored("y", 0.0, 0.1), scored("z", 0.0, 0.0)]
"""Mean 0.5 and deviation 1/√3 of what is right; the same of what is short, but a tenth as large."""


def test_a_term_with_a_small_variance_counts_by_its_weight() -> None:
    """Each score is ±√3/2 deviations from its mean. The sum of the rewards has 1.05, 1, 0.05 and 0 instead."""
    found = assign_credit(PAIRS, CreditRules(terms=[RIGHT, SHORT])).advantages
    unit = math.sqrt(3) / 2
    assert [found[call] for call in ("w0", "x0", "y0", "z0")] == pytest.approx(
        [1.5 * unit, 0.5 * unit, -0.5 * unit, -1.5 * unit], abs=1e-4
    )
    together = assign_credit(PAIRS, CreditRules()).advantages
    assert together["w0"] - together["x0"] < 0.2


def test_without_scaling_the_weights_are_those_of_the_sum() -> None:
    rules = CreditRules(advantage="dr-grpo", terms=[RIGHT, SHORT])
    credit = assign_credit(PAIRS, rules)
    assert [credit.advantages[call] for call in ("w0", "x0", "y0", "z0")] == pytest.approx(
        [0.525, 0.475, -0.475, -0.525]
    )
    assert [credit.values[call] for call in ("w0", "x0", "y0", "z0")] == pytest.approx([1.05, 1.0, 0.05, 0.0])


def test_other_rewards_are_compared_without_the_terms() -> None:
    """The episode's rewards 1 and 0 have the advantages ±1/√2, and what is right is against them."""
    pair = [scored("x", 0.0, 0.3, reward=1.0), scored("y", 1.0, 0.3, reward=0.0)]
    credit = assign_credit(pair, CreditRules(terms=[RewardTerm(name="right", weight=3.0), SHORT]))
    assert credit.advantages["x0"] == pytest.approx((1 - 3) / math.sqrt(2), abs=1e-4)
    assert (credit.metrics["groups"], credit.metrics["groups_equal"], credit.metrics["groups_wasted"]) == (1, 0, 0)
    assert (credit.metrics["right_groups_equal"], credit.metrics["short_groups_equal"]) == (0, 1)


def test_a_term_of_an_agent_changes_the_calls_of_that_agent_only() -> None:
    def attempt(rollout: str, score: float) -> Episode:
        return episode(rollout, 0.0, "abab", extra=(Reward(value=score, agent="b", name="right"),))

    rules = CreditRules(terms=[RewardTerm(name="right", agents=["b"])])
    for rewards in ("broadcast", "explicit"):
        for advantage in ("grpo", "reinforce++"):
            own = CreditRules(rewards=rewards, advantage=advantage, terms=rules.terms)
            found = assign_credit([attempt("x", 1.0), attempt("y", 0.2)], own).advantages
            expected = 0.4 / (0.8 / math.sqrt(2) + EPSILON)
            assert found == pytest.approx(
                {"x0": 0, "x1": expected, "x2": 0, "x3": expected, "y0": 0, "y1": -expected, "y2": 0, "y3": -expected}
            )


def test_a_term_for_all_agents_with_a_limit_to_some() -> None:
    """The reward is the episode's; the limit decides whose calls it counts for."""
    pair = [scored("x", 1.0, 0.0, "ab"), scored("y", 0.0, 0.0, "ab")]
    found = assign_credit(pair, CreditRules(terms=[RewardTerm(name="right", agents=["a"])])).advantages
    assert found["x0"] > 0.7
    assert found["x1"] == 0


def test_a_rollout_without_the_reward_is_not_one_with_the_reward_0() -> None:
    """Over the batch, only the scored pair is compared: 0.6 and 0.4."""
    pair = [scored("x", 0.6, 0.0), scored("y", 0.4, 0.0)]
    unscored = [episode(rollout, 0.0) for rollout in ("u", "v")]
    found = assign_credit([*pair, *unscored], CreditRules(advantage="reinforce++", terms=[RIGHT])).advantages
    assert [found["x0"], found["y0"], found["u0"]] == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2), 0], abs=1e-4)


# Rules whose values have a baseline already are not compared within groups; the configuration refuses it.
COMBINATIONS = [
    (reward, advantage)
    for reward, rule in REWARD_RULES.items()
    for advantage, compared in ADVANTAGE_RULES.items()
    if "critic" not in rule.needs and not (rule.baseline and compared.compares == "group")
]


@pytest.mark.parametrize(("rewards", "advantage"), COMBINATIONS)
def test_the_explanation_adds_up_to_the_advantage(rewards: str, advantage: str) -> None:
    episodes = [scored("x", 1.0, 0.1, "ab", reward=1.0), scored("y", 0.3, 0.4, "aab"), scored("z", 0.0, 0.4, "b")]
    terms = [RIGHT, RewardTerm(name="short", weight=-0.5, agents=["b"])]
    rules = {"policy": CreditRules(rewards=rewards, advantage=advantage, gamma=0.9, terms=terms)}
    trained = assign_by_policy(episodes, rules).advantages
    explained = explain_credit(episodes, rules)
    assert {call: found.advantage for call, found in explained.items()} == pytest.approx(trained)
    assert "right" in {group.component for found in explained.values() for group in found.groups}
    assert not any(group.component.startswith("short") for group in explained["x0"].groups)


def test_a_critic_predicts_the_sum_of_all_rewards() -> None:
    with pytest.raises(CreditError, match="'gae' cannot compare 'right' on its own"):
        CreditRules(rewards="gae", gamma=1.0, advantage="none", terms=[RIGHT])
