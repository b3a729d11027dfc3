"""Invariants of every rule that Lightning declares, and of those in examples/rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_core import CreditRules, Episode, assign_credit
from lightning_core.config.rule_names import function_of
from lightning_core.credit import ADVANTAGE_RULES, GROUP_KEYS, REWARD_RULES, assign_by_policy
from lightning_core.rollouts.refill import without_gradient
from lightning_core.trace import Reward
from tests.credit.episodes import call, episode, from_calls

COMPARING = [name for name, rule in ADVANTAGE_RULES.items() if rule.compares]
EXAMPLES = [
    "examples.rules.branches:leave_one_branch_out",
    "examples.rules.hgpo:hgpo",
    "examples.rules.information_gain:a2tgpo",
    "examples.rules.information_gain:igpo_variant",
    "examples.rules.tree:tree",
]
REWARDS = [*REWARD_RULES, *EXAMPLES]
WITHOUT_CRITIC = [name for name in REWARDS if name in EXAMPLES or "critic" not in REWARD_RULES[name].needs]
WITH_BASELINE = [name for name, rule in REWARD_RULES.items() if rule.baseline]
KEYS = [*GROUP_KEYS, "examples.rules.tree:within_tree"]
GROUPINGS = [None, *chain.from_iterable(combinations(KEYS, n) for n in (1, 2))]

POSITIVE = {"maxrl"}
"""Rules that accept no negative values."""


def spread(pairs: Sequence[tuple[Any, Any]], every: int) -> list[Any]:
    """All pairs; the short form has one of ``every`` for each first and each second value."""
    first, second = ([*dict.fromkeys(pair[i] for pair in pairs)] for i in (0, 1))
    return [
        pytest.param(
            a, b, marks=() if (first.index(a) + second.index(b)) % every == 0 else pytest.mark.long, id=f"{a}-{b}"
        )
        for a, b in pairs
    ]


COMPARED = spread([*product(WITHOUT_CRITIC, COMPARING)], 3)

agents = st.text("ab", min_size=1, max_size=4)
numbers = st.sampled_from([-1.0, 0.0, 0.1, 0.3, 1.0])


def rules_of(rewards: str, advantage: str = "grpo", group_by: Sequence[str] | None = None) -> CreditRules:
    keys = None if group_by is None else [function_of(key, key="credit.group_by") for key in group_by]
    return CreditRules(
        rewards=function_of(rewards, key="credit.rewards"), advantage=advantage, gamma=0.9, group_by=keys
    )


def given_rewards(
    name: str, agents: str, by_agent: Sequence[tuple[str, float]], by_turn: Sequence[float]
) -> list[Reward]:
    """Rewards of agents, and one for each of the first calls of the episode ``name``."""
    rewards = [Reward(value=value, agent=agent) for agent, value in by_agent]
    return rewards + [Reward(value=value, call=f"{name}{i}") for i, value in enumerate(by_turn[: len(agents)])]


def with_rewards(
    name: str, reward: float, agents: str, by_agent: Sequence[tuple[str, float]] = (), by_turn: Sequence[float] = ()
) -> Episode:
    return episode(name, reward, agents, extra=tuple(given_rewards(name, agents, by_agent, by_turn)))


@pytest.mark.parametrize(("rewards", "advantage"), COMPARED)
@settings(max_examples=12)
@given(st.lists(agents, min_size=2, max_size=5), numbers, numbers)
def test_attempts_with_equal_rewards_get_no_advantage(
    rewards: str, advantage: str, attempts: list[str], reward: float, own: float
) -> None:
    """Any number of calls; agent a makes calls, and is rewarded, in all rollouts."""
    episodes = [with_rewards(f"r{i}-", reward, f"a{a}", [("a", own)]) for i, a in enumerate(attempts)]
    credit = assign_credit(episodes, rules_of(rewards, advantage))
    assert set(credit.advantages.values()) == {0.0}
    assert without_gradient(episodes, credit) == ["t"], "dynamic sampling replaces the group"


@pytest.mark.parametrize(("rewards", "advantage"), COMPARED)
@settings(max_examples=12)
@given(agents, numbers, st.lists(numbers, max_size=4), numbers, numbers)
def test_copies_of_an_attempt_get_no_advantage(
    rewards: str, advantage: str, agents: str, reward: float, by_turn: list[float], a: float, b: float
) -> None:
    """With any rewards in it."""
    episodes = [with_rewards(f"r{i}-", reward, agents, [("a", a), ("b", b)], by_turn) for i in range(3)]
    credit = assign_credit(episodes, rules_of(rewards, advantage))
    assert set(credit.advantages.values()) == {0.0}


@pytest.mark.parametrize(("rewards", "advantage"), COMPARED)
def test_the_rounding_errors_of_float32_rewards_get_no_advantage(rewards: str, advantage: str) -> None:
    """The same reward as one float32 number, as a sum of two, as two rewards, and as the difference of large ones."""
    one, (a, b) = float(np.float32(301.6)), np.array([100.7, 200.9], dtype=np.float32)
    assert float(a + b) != one
    large = [float(np.float32(x)) for x in (30_000_301.6, -30_000_000)]
    parts = [[one], [float(a + b)], [float(a), float(b)], large]
    attempts = [
        episode(f"r{i}-", r, "a" * (1 + i % 2), extra=tuple(Reward(value=v) for v in more))
        for i, (r, *more) in enumerate(parts)
    ]
    for episodes in (attempts[:3], attempts[1::2]):  # of 2, 1 and 2 calls; and of 2 each
        credit = assign_credit(episodes, rules_of(rewards, advantage))
        assert set(credit.advantages.values()) == {0.0}
        assert credit.metrics["groups_equal"] + credit.metrics["groups_single"] == credit.metrics["groups"]


@pytest.mark.parametrize("advantage", COMPARING)
def test_rewards_that_differ_by_more_than_rounding_are_compared(advantage: str) -> None:
    """A thousandth of the largest reward's tenth: 300 times the precision."""
    episodes = [episode("x", 301.6), episode("y", 301.7), episode("z", -1, task="u")]
    assert assign_credit(episodes, rules_of("broadcast", advantage)).advantages["x0"] != 0


@pytest.mark.parametrize(("rewards", "group_by"), spread([*product(WITHOUT_CRITIC, GROUPINGS)], 6))
def test_equal_rewards_are_equal_under_any_grouping(rewards: str, group_by: Any) -> None:
    episodes = [episode(f"r{i}-", 1, "a" * n) for i, n in enumerate((2, 2, 1, 4))]
    credit = assign_credit(episodes, rules_of(rewards, group_by=group_by))
    assert set(credit.advantages.values()) == {0.0}


def test_calls_of_unequal_attempts_are_compared_at_the_same_turn() -> None:
    """γ = 0.5: first calls 0.5, 0.5, 0, second calls 1, 1, 0, each minus its mean; a third call is alone in its group."""
    episodes = [episode("x", 1, "aa"), episode("y", 1, "aa"), episode("z", 0, "aaa")]
    rules = CreditRules(rewards="discounted", gamma=0.5, advantage="dr-grpo")
    assert dict(assign_credit(episodes, rules).advantages) == pytest.approx(
        {"x0": 1 / 6, "y0": 1 / 6, "z0": -1 / 3, "x1": 1 / 3, "y1": 1 / 3, "z1": -2 / 3, "z2": 0}
    )


def test_last_calls_are_compared_with_last_calls() -> None:
    """x ends after one call, y after two, z fails after two: y's first call is neither good nor bad."""
    episodes = [episode("x", 1, "a"), episode("y", 1, "aa"), episode("z", 0, "aa")]
    found = assign_credit(episodes, CreditRules(rewards="last-call", advantage="dr-grpo")).advantages
    assert dict(found) == pytest.approx({"x0": 1 / 3, "y0": 0, "y1": 1 / 3, "z0": 0, "z1": -2 / 3})


def two_policies(name: str, reward: float, agents: str, extra: Sequence[Reward]) -> Episode:
    """Agent a of policy A, agent b of policy B."""
    calls = [call(f"{name}{i}", name, agent, i, model=agent.upper()) for i, agent in enumerate(agents)]
    return from_calls(calls, reward, extra=extra)


@pytest.mark.parametrize(
    ("rewards", "advantage"),
    # The values of a rule with a baseline may be negative.
    spread([(r, a) for r in REWARDS for a in ADVANTAGE_RULES if a not in POSITIVE or r not in WITH_BASELINE], 3),
)
@settings(max_examples=12)
@given(st.lists(st.tuples(agents, numbers, numbers), min_size=2, max_size=4))
def test_a_reward_of_one_agent_moves_no_other_policys_calls(
    rewards: str, advantage: str, attempts: list[tuple[str, float, float]]
) -> None:
    """Also if that agent was never called."""
    if advantage in POSITIVE:
        attempts = [(agents, abs(reward), abs(own)) for agents, reward, own in attempts]
    rules = dict.fromkeys("AB", rules_of(rewards, advantage))

    def advantages(rewarded: bool) -> dict[str, float]:
        episodes = [
            two_policies(f"r{i}-", reward, agents, [Reward(value=own, agent="b")] if rewarded else [])
            for i, (agents, reward, own) in enumerate(attempts)
        ]
        values = {t.call: 0.25 for e in episodes for t in e.transitions}
        found = assign_by_policy(episodes, rules, values=values).advantages
        return {t.call: found[t.call] for e in episodes for t in e.transitions if t.policy == "A"}

    assert advantages(True) == advantages(False)


@pytest.mark.parametrize("rewards", REWARDS)
def test_a_reward_of_an_untrained_agent_changes_no_advantage(rewards: str) -> None:
    episodes = [episode("x", 1, "aa", extra=(Reward(value=5, agent="frozen"),)), episode("y", 0, "aa")]
    plain = [replace(e, rewards=[r for r in e.rewards if r.agent is None]) for e in episodes]
    values = dict.fromkeys(("x0", "x1", "y0", "y1"), 0.0)
    rules = rules_of(rewards)
    assert (
        assign_credit(episodes, rules, values=values).advantages
        == assign_credit(plain, rules, values=values).advantages
    )


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("advantage", [name for name, rule in ADVANTAGE_RULES.items() if rule.compares == "batch"])
@settings(max_examples=12)
@given(st.lists(st.tuples(agents, numbers), min_size=2, max_size=5), st.sampled_from(GROUPINGS))
def test_a_rule_over_the_batch_does_not_depend_on_the_grouping(
    advantage: str, rewards: str, attempts: list[tuple[str, float]], group_by: Any
) -> None:
    episodes = [episode(f"r{i}-", reward, agents, task=f"t{i % 2}") for i, (agents, reward) in enumerate(attempts)]
    values = {t.call: 0.25 for e in episodes for t in e.transitions}

    def advantages(keys: Any) -> Any:
        rules = rules_of(rewards, advantage, keys)
        return assign_credit(episodes, rules, values=values).advantages

    assert advantages(group_by) == advantages(("task",))


def test_over_the_batch_a_rollout_counts_once_in_any_groups() -> None:
    """x has two calls of a and one of b: mean (1 + 0)/2, not weighted by the agents' groups."""
    episodes = [episode("x", 1, "aab"), episode("y", 0, "a")]
    rules = CreditRules(advantage="reinforce++", group_by=("task", "agent"), rewards="explicit")
    rewarded = [
        replace(episodes[0], rewards=[Reward(value=1, call="x0"), Reward(value=1, call="x1")]),
        replace(episodes[1], rewards=[]),
    ]
    mean = (2 / 3 + 0) / 2
    deviation = ((2 * (1 - mean) ** 2 + mean**2) / 3 + mean**2) ** 0.5
    assert assign_credit(rewarded, rules).advantages["x0"] == pytest.approx((1 - mean) / (deviation + 1e-6))
