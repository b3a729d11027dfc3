"""Explanations of credit add up to the advantages that were trained on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_core import CreditRules, Episode
from lightning_core.credit import ADVANTAGE_RULES, GROUP_KEYS, REWARD_RULES, assign_by_policy
from lightning_core.credit.explain import explain_credit
from lightning_core.trace import Reward
from tests.credit.episodes import call, episode, from_calls

EPISODES = [
    episode("a", 1.0, "ab", extra=(Reward(value=0.5, call="a0"),)),
    episode("b", 0.0, "aab"),
    episode("c", 0.3, "ba", extra=(Reward(value=-1.0, agent="b"),)),
]
POSITIVE = [replace(e, rewards=[r for r in e.rewards if r.value >= 0]) for e in EPISODES]
"""For rules that accept no negative values."""


@pytest.mark.parametrize(
    ("rewards", "advantage"),
    [
        (name, advantage)
        for name, rule in REWARD_RULES.items()
        for advantage in ADVANTAGE_RULES
        if "critic" not in rule.needs and (advantage != "maxrl" or not rule.baseline)
    ],
)
@pytest.mark.parametrize(
    "keys", [None, *(pytest.param(keys, marks=pytest.mark.long) for keys in (["task"], ["agent"])), sorted(GROUP_KEYS)]
)
def test_the_groups_add_up_to_the_advantage(rewards: str, advantage: str, keys: list[str] | None) -> None:
    rules = {"policy": CreditRules(rewards=rewards, advantage=advantage, gamma=0.9, group_by=keys)}
    episodes = POSITIVE if advantage == "maxrl" else EPISODES
    trained = assign_by_policy(episodes, rules).advantages
    explained = explain_credit(episodes, rules)
    assert {call: found.advantage for call, found in explained.items()} == pytest.approx(trained)
    for identity, found in explained.items():
        for group in found.groups:
            assert [m.value for m in group.members if m.call == identity] == [group.value]


def test_baseline_and_rewards_of_a_call() -> None:
    explained = explain_credit(EPISODES, {"policy": CreditRules(advantage="dr-grpo", group_by=["task"])})
    (group,) = explained["a0"].groups
    # Rollouts a, b and c are worth 1.5, 0 and 0.3 for agent a; 1.5, 0 and -0.7 for b. Each rollout counts once.
    assert group.mean == pytest.approx((1.5 + 0.0 + (0.3 - 0.7) / 2) / 3)
    assert group.value == 1.5
    assert group.advantage == pytest.approx(group.value - group.mean)
    assert tuple(explained["a0"].rewards) == EPISODES[0].rewards


def test_each_policy_by_its_own_rules_with_the_rewards_of_a_signal() -> None:
    penalty = Reward(value=-0.25, call="a1", name="penalty")

    def attempt(rollout: str, reward: float, *, fails: bool) -> Episode:
        calls = [
            call(f"{rollout}1", rollout, "writer", 0, model="sql"),
            call(f"{rollout}2", rollout, "critic", 1, model="critic"),
        ]
        found = from_calls(calls, reward)
        return replace(found, rewards=(*found.rewards, penalty)) if fails else found

    episodes = [attempt("a", 1.0, fails=True), attempt("b", 0.0, fails=False)]
    rules = {
        "sql": CreditRules(rewards="discounted", gamma=0.5),
        "critic": CreditRules(advantage="dr-grpo"),
    }
    trained = assign_by_policy(episodes, rules).advantages
    explained = explain_credit(episodes, rules)
    assert {call: found.advantage for call, found in explained.items()} == pytest.approx(trained)
    assert penalty in explained["a1"].rewards
