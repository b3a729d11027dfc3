"""The rules that use forks, against hand-computed numbers and the exact value of a small decision process."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_core import CreditRules, Episode, assign_credit
from lightning_core.config.rule_names import function_of
from lightning_core.credit import RewardTerm, assign_by_policy
from lightning_core.rollouts.refill import without_gradient
from lightning_core.signals.air.keys import Air, Format
from lightning_core.signals.air.rewards import air_sum, with_air
from lightning_core.trace import Reward
from tests.credit.episodes import call, from_calls


def attempt(name: str, reward: float, *calls: dict[str, Any], agent: str = "a", task: str = "t") -> Episode:
    """A rollout with one call for each of ``calls``, which are their differences; the ids are NAME0, NAME1, …."""
    made = [call(f"{name}{i}", name, agent, i, **changes) for i, changes in enumerate(calls)]
    found = from_calls(made, reward, task=task)
    return replace(found, transitions=[t for t, c in zip(found.transitions, made, strict=True) if c.replays is None])


def group() -> list[Episode]:
    """The attempts o and p, and two forks of o's second call."""
    return [
        attempt("o", 1.0, {}, {}, {}),
        attempt("p", 0.0, {}, {}),
        attempt("f", 0.0, {"replays": "o0"}, {"forks": "o1"}, {}),
        attempt("g", 0.5, {"replays": "o0"}, {"forks": "o1"}),
    ]


def credit(rewards: str, advantage: str, episodes: list[Episode] | None = None) -> dict[str, float]:
    found = assign_credit(episodes or group(), CreditRules(rewards=rewards, advantage=advantage))
    return {name: pytest.approx(value) for name, value in found.advantages.items()}  # pyright: ignore[reportUnknownMemberType]


def test_counterfactual_compares_the_responses_to_the_same_history():
    """o0 earned (1 + 0 + 0.5) / 3 = 0.5 against p's 0. At the fork: 1 against 0.25, 0 against 0.75, 0.5 against 0.5."""
    assert credit("counterfactual", "rloo") == {
        "o0": 0.5, "p0": -0.5, "p1": -0.5, "o1": 0.75, "o2": 0.75, "f1": -0.75, "f2": -0.75, "g1": 0.0,
    }  # fmt: skip


def test_the_rules_of_forks_see_the_rewards_of_one_term_at_a_time():
    """The scores are those of the test above; all rollouts have the same reward of the episode."""
    scored = [
        replace(
            e,
            rewards=(
                Reward(value=5.0),
                Reward(value=e.reward, name="judge_right"),
                Reward(value=3.0, name="judge_short"),
            ),
        )
        for e in group()
    ]
    terms = [RewardTerm(name="judge_right", weight=2.0), RewardTerm(name="judge_short")]
    for rewards, same in (("counterfactual", 5.0 + 3.0), ("vine", 0.0)):
        found = assign_credit(scored, CreditRules(rewards=rewards, advantage="none", terms=terms)).values
        alone = assign_credit(group(), CreditRules(rewards=rewards, advantage="none")).values
        assert found == pytest.approx({name: 2 * value + same for name, value in alone.items()})
    rules = CreditRules(rewards="counterfactual", advantage="rloo", terms=terms)
    expected = {name: 2 * value for name, value in assign_credit(group(), replace(rules, terms=())).advantages.items()}
    assert assign_credit(scored, rules).advantages == pytest.approx(expected)
    assert assign_by_policy(scored, {"first": rules, "policy": rules}).advantages == pytest.approx(expected)


def test_vine_is_the_difference_of_the_values_around_a_call():
    """V before the fork is 0.5 = (1 + 0 + 0.5) / 3; p's tree is worth 0, o's 0.5. After the fork: the return, less the others' mean."""
    assert credit("vine", "none") == {
        "o0": 0.5, "p0": -0.5, "p1": -0.5, "o1": 0.75, "o2": 0.75, "f1": -0.75, "f2": -0.75, "g1": 0.0,
    }  # fmt: skip


def test_vine_between_two_forks_is_the_difference_of_their_values():
    """V(o1) is (1 + 0) / 2 = 0.5 without o's own way: 0 for o1; V(o2) = (1 + 0.2) / 2 = 0.6."""
    episodes = [
        attempt("o", 1.0, {}, {}, {}),
        attempt("f", 0.0, {"replays": "o0"}, {"forks": "o1"}),
        attempt("h", 0.2, {"replays": "o0"}, {"replays": "o1"}, {"forks": "o2"}),
    ]
    # f's baseline: the mean of o and h; o0 has no other attempt to compare with.
    assert credit("vine", "none", episodes) == {"o0": 0.0, "o1": 0.6, "o2": 0.8, "f1": -0.6, "h2": -0.8}


def forks_of_forks() -> list[Episode]:
    """o, its fork f at the second call, and two forks of f: h at the third, and i at the second, which is o's decision too."""
    return [
        attempt("o", 1.0, {}, {}, {}),
        attempt("f", 0.0, {"replays": "o0"}, {"forks": "o1"}, {}),
        attempt("h", 0.8, {"replays": "o0"}, {"replays": "f1"}, {"forks": "f2"}),
        attempt("i", 0.4, {"replays": "o0"}, {"forks": "o1"}, {}),
    ]


def test_a_fork_of_a_fork_is_a_choice_of_the_decisions_that_it_repeats():
    """h goes through f1, so it is a sample of the decision o1: there o is compared with f, h and i, and f1 with o and i."""
    assert credit("vine", "none", forks_of_forks()) == {
        "o0": 0.0, "o1": 1 - 0.4, "o2": 1 - 0.4, "f1": 0.4 - 0.7, "f2": -0.8, "h2": 0.8, "i1": 0.4 - 0.6, "i2": 0.4 - 0.6,
    }  # fmt: skip
    assert credit("counterfactual", "none", forks_of_forks()) == {
        "o0": 0.55, "o1": 1.0, "o2": 1.0, "f1": 0.4, "f2": 0.0, "h2": 0.8, "i1": 0.4, "i2": 0.4,
    }  # fmt: skip


def test_a_call_beside_the_fork_does_not_depend_on_it():
    """b ran while a did. It earned (1 + 0) / 2 with either response of a, and is compared with the other attempt."""
    episodes = [
        attempt("o", 1.0, {"end_ns": 3 * 10**9}, {}),
        attempt("f", 0.0, {"forks": "o0", "end_ns": 3 * 10**9}, {"replays": "o1"}),
        attempt("p", 0.0, {}),
    ]
    found = credit("counterfactual", "rloo", episodes)
    assert (found["o0"], found["f0"]) == (1.0, -1.0)
    assert (found["o1"], found["p0"]) == (0.5, -0.5)


def test_each_policy_compares_its_own_calls():
    """Two agents with a policy each: o1 is the second one's, and the fork says nothing of the first one."""

    def two(name: str, reward: float, *changes: dict[str, Any]) -> Episode:
        own = [{**c, "model": model} for c, model in zip(changes, ("first", "second"), strict=True)]
        return attempt(name, reward, *own)

    episodes = [
        two("o", 1.0, {}, {}),
        two("p", 0.0, {}, {}),
        two("f", 0.0, {"replays": "o0"}, {"forks": "o1"}),
    ]
    rules = CreditRules(rewards="counterfactual", advantage="rloo")
    found = assign_by_policy(episodes, {"first": rules, "second": rules}).advantages
    assert (found["o0"], found["p0"]) == (0.5, -0.5)
    assert (found["o1"], found["f1"]) == (1.0, -1.0)
    assert found["p1"] == 0.0


@pytest.mark.parametrize("policies", [["policy"], ["policy", "other"]])
@pytest.mark.parametrize("advantage", ["grpo", "rloo", "none"])
@pytest.mark.parametrize("rewards", ["counterfactual", "vine", "examples.rules.tree:tree"])
def test_a_fork_has_the_intermediate_rewards_of_the_calls_that_it_repeats(
    rewards: str, advantage: str, policies: list[str]
):
    """All rollouts earn the same, in as many calls. Without the rewards of repeated calls, forks would be better by their cost."""
    trained = {"trained": True}
    episodes = [
        attempt("o", 1.0, trained, trained, trained),
        attempt("p", 1.0, trained, trained, trained),
        attempt("f", 1.0, {**trained, "replays": "o0"}, {**trained, "replays": "o1"}, {**trained, "forks": "o2"}),
        attempt("g", 1.0, {**trained, "replays": "p0"}, {**trained, "forks": "p1"}, trained),
    ]
    air = Air(call_cost=0.01, token_cost=0.1, formats=(Format(pattern="answer", weight=0.5),))
    episodes = with_air(episodes, air, solved=1.0)
    rules = CreditRules(rewards=function_of(rewards, key="credit.rewards"), advantage=advantage)
    credit = assign_by_policy(episodes, dict.fromkeys(policies, rules))
    if advantage != "none" or rewards == "vine":
        assert set(credit.advantages.values()) == {0.0}
        assert without_gradient(episodes, credit) == ["t"], "dynamic sampling replaces the group"
    else:
        assert list(credit.values.values()) == pytest.approx([1.0 + 3 * 0.39] * 9)
    assert air_sum(episodes) == pytest.approx(9 * 0.39), "calls that were sampled count once"


def test_turns_count_the_calls_that_a_fork_repeats():
    """o1 and f1 are second calls of their agent: with `turn` among the keys they are still compared."""
    changes = [{"replays": "o0", "trained": True}, {"forks": "o1"}]
    episodes = [attempt("o", 1.0, {}, {}), attempt("f", 0.0, *changes)]
    assert [e.turns for e in episodes] == [[0, 1], [1]]
    assert [e.turns_left for e in episodes] == [[1, 0], [0]]
    rules = CreditRules(rewards="counterfactual", advantage="rloo", group_by=["task", "fork", "turn"])
    assert assign_credit(episodes, rules).advantages == {"o0": 0.0, "o1": 1.0, "f1": -1.0}


def test_vine_is_unbiased():
    """Two decisions of 0 or 1; the return is their product. Over all outcomes of a fork at the second decision, the mean of
    advantage times score is the exact gradient, for each decision's logit at probability p."""
    p, q = 0.3, 0.6
    gradient = [0.0, 0.0]

    def chance(value: int, probability: float) -> float:
        return probability if value else 1 - probability

    for x, y, other, x2, y2 in itertools.product((0, 1), repeat=5):
        weight = chance(x, p) * chance(y, q) * chance(other, q) * chance(x2, p) * chance(y2, q)
        episodes = [
            attempt("o", x * y, {}, {}),
            attempt("f", x * other, {"replays": "o0"}, {"forks": "o1"}),
            attempt("r", x2 * y2, {}, {}),
        ]
        found = assign_credit(episodes, CreditRules(rewards="vine", advantage="none")).advantages
        gradient[0] += weight * found["o0"] * (x - p)
        gradient[1] += weight * found["o1"] * (y - q)
    # d E[xy] / d logit = q p (1 - p) and p q (1 - q)
    assert gradient == pytest.approx([q * p * (1 - p), p * q * (1 - q)])


def test_vine_is_unbiased_with_forks_of_forks():
    """Three decisions, forked at the second and from there at the third. As above, with the credit of the forks' own calls,
    each of which estimates the gradient of its decision."""
    p, q, r = 0.3, 0.6, 0.7
    gradient = dict.fromkeys(("o0", "o1", "o2", "f1", "f2", "h2"), 0.0)

    def chance(value: int, probability: float) -> float:
        return probability if value else 1 - probability

    for x, y, z, y2, z2, z3 in itertools.product((0, 1), repeat=6):
        sampled = {"o0": (x, p), "o1": (y, q), "o2": (z, r), "f1": (y2, q), "f2": (z2, r), "h2": (z3, r)}
        weight = math.prod(chance(value, probability) for value, probability in sampled.values())
        episodes = [
            attempt("o", x * y * z, {}, {}, {}),
            attempt("f", x * y2 * z2, {"replays": "o0"}, {"forks": "o1"}, {}),
            attempt("h", x * y2 * z3, {"replays": "o0"}, {"replays": "f1"}, {"forks": "f2"}),
            attempt("s", 0.0, {}),
        ]
        found = assign_credit(episodes, CreditRules(rewards="vine", advantage="none")).advantages
        for name, (value, probability) in sampled.items():
            gradient[name] += weight * found[name] * (value - probability)
    first, second, third = (p * q * r * (1 - own) for own in (p, q, r))
    assert gradient == pytest.approx({"o0": first, "o1": second, "o2": third, "f1": second, "f2": third, "h2": third})
