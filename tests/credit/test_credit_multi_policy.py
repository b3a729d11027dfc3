"""Credit of several policies: shared rewards; calls, rules and groups per policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_core.credit import CreditRules, Episode, assign_by_policy, assign_credit
from lightning_core.trace import Reward
from tests.credit.episodes import call, from_calls


def episode(rollout: str, reward: float, *, extra: tuple[Reward, ...] = ()) -> Episode:
    """Writer, critic, writer."""
    return from_calls(
        [
            call(f"{rollout}1", rollout, "writer", 0, model="sql"),
            call(f"{rollout}2", rollout, "critic", 1, model="critic"),
            call(f"{rollout}3", rollout, "writer", 2, model="sql"),
        ],
        reward,
        extra=extra,
    )


RULES = {
    "sql": CreditRules(rewards="discounted", gamma=0.5, advantage="none"),
    "critic": CreditRules(rewards="broadcast", advantage="dr-grpo"),
}


def test_each_policy_by_its_own_rules() -> None:
    credit = assign_by_policy([episode("a", 1.0), episode("b", 0.0)], RULES)
    # Only the writer's calls count: the reward of its second call is discounted once for its first.
    assert credit.values == {"a1": 0.5, "a3": 1.0, "a2": 1.0, "b1": 0.0, "b3": 0.0, "b2": 0.0}
    assert credit.advantages == {"a1": 0.5, "a3": 1.0, "a2": 0.5, "b1": 0.0, "b3": 0.0, "b2": -0.5}
    assert credit.metrics["sql/groups"] == 2, "the writer's first and its second calls"
    assert credit.metrics["critic/groups"] == 1


def test_the_return_is_the_teams() -> None:
    """A reward on a call of one policy is part of the return that another policy broadcasts."""
    extra = (Reward(value=0.25, call="a1"), Reward(value=2.0, agent="writer"))
    credit = assign_by_policy([episode("a", 1.0, extra=extra)], {**RULES, "sql": CreditRules(advantage="none")})
    assert credit.values == {"a1": 3.25, "a3": 3.25, "a2": 1.25}


def test_an_episode_without_calls_of_a_policy_is_not_a_sample_of_it() -> None:
    silent = episode("b", 0.0)
    silent = replace(silent, transitions=[t for t in silent.transitions if t.policy == "sql"])
    credit = assign_by_policy([episode("a", 1.0), silent], RULES)
    assert credit.advantages["a2"] == 0
    assert credit.metrics["critic/groups_single"] == 1


def test_one_policy_is_credited_as_ever() -> None:
    episodes = [episode("a", 1.0), episode("b", 0.0)]
    assert assign_by_policy(episodes, {"policy": CreditRules()}) == assign_credit(episodes, CreditRules())


@pytest.mark.parametrize("group_by", [("task",), ("task", "agent"), ("task", "policy")])
def test_the_same_rules_for_all_are_those_of_one_policy_grouped_by_policy(group_by: tuple[str, ...]) -> None:
    episodes = [episode("a", 1.0), episode("b", 0.0), episode("c", 0.25)]
    apart = assign_by_policy(episodes, dict.fromkeys(("sql", "critic"), CreditRules(group_by=group_by)))
    together = assign_credit(episodes, CreditRules(group_by=tuple(dict.fromkeys((*group_by, "policy")))))
    assert apart.advantages == pytest.approx(together.advantages)
