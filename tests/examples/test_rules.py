"""The credit rules of examples/rules, named as module:callable in a configuration, against hand-computed numbers.

`tests.credit.test_rule_invariants` has the reward rules among those whose invariants it checks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from lightning_core import load_config
from lightning_core.config.build_rules import policy_rules
from lightning_core.credit import CreditRules, Episode, assign_credit
from lightning_core.credit.explain import explain_credit
from lightning_core.errors import ConfigError
from lightning_core.trace import Reward
from tests.credit.episodes import call, episode, event, from_calls
from tests.credit.test_credit_rules import news, values
from tests.credit.test_policy_gradient import exact, expectation
from tests.signals.test_forks_rules import group
from tests.signals.test_information_gain_rules import attempt

GAINS = "information_gain"


def rules_of(name: str, *, needed: bool = True, **credit: Any) -> CreditRules:
    """The rules of a configuration with ``rewards: examples.rules.<name>``, and what that rule needs."""
    settings: dict[str, Any] = {"rewards": f"examples.rules.{name}", **credit}
    rollouts: dict[str, Any] = {}
    if needed and name.startswith(GAINS):
        settings["information_gain"] = {"answer": "answer"}
    if needed and name.startswith("tree"):
        rollouts["forks"] = {}
    (rules,) = policy_rules(load_config({"policy": {"model": "m"}, "credit": settings, "rollouts": rollouts})).values()
    return rules


def test_leave_one_branch_out():
    """Two parallel branches of agent a with rewards 0.6 and 0.2; calls before and after them are in no branch."""
    calls = [
        call("before", "x", "a", 0),
        call("left", "x", "a", 1, parent="l", start_ns=10 * 10**9),
        call("right", "x", "a", 2, parent="r", start_ns=11 * 10**9),
        call("right again", "x", "a", 3, parent="r", start_ns=12 * 10**9),
        call("after", "x", "a", 4, start_ns=20 * 10**9, end_ns=21 * 10**9),
    ]
    events = [event("l", "node", 10, 13), event("r", "node", 10.5, 14)]
    extra = (Reward(value=0.6, call="left"), Reward(value=0.2, call="right again"))
    found = values(from_calls(calls, 1, extra=extra, events=events), rules_of("branches:leave_one_branch_out"))
    whole = 1 + 0.6 + 0.2
    assert found == pytest.approx([whole, whole + 0.4, whole - 0.4, whole - 0.4, whole])


def test_branches_of_other_agents_or_one_after_the_other_are_not_compared():
    extra = (Reward(value=0.6, call="x0"),)
    rules = rules_of("branches:leave_one_branch_out")
    beside = [call("x0", "x", "a", 0, start_ns=0, end_ns=9), call("x1", "x", "b", 1, start_ns=1, end_ns=8)]
    after = [call("x0", "x", "a", 0, start_ns=0, end_ns=9), call("x1", "x", "a", 1, start_ns=9, end_ns=18)]
    for calls in (beside, after):
        assert values(from_calls(calls, 1, extra=extra), rules) == pytest.approx([1.6, 1.6])


def test_a_call_in_nested_branches_is_compared_in_the_innermost():
    calls = [
        call("p", "x", "a", 0, parent="inner", start_ns=1, end_ns=5),
        call("q", "x", "a", 1, parent="inner", start_ns=2, end_ns=6),
        call("r", "x", "a", 2, parent="outer", start_ns=2, end_ns=6),
    ]
    events = [
        event("inner", "node", 0, 1, start_ns=0, end_ns=10),
        event("outer", "node", 0, 1, start_ns=0, end_ns=10),
    ]
    extra = (Reward(value=1, call="p"),)
    found = values(from_calls(calls, 0, extra=extra, events=events), rules_of("branches:leave_one_branch_out"))
    assert found == pytest.approx([1 + 1, 1 - 1, 1])


def test_leave_one_branch_out_has_no_bias():
    """With γ = 1, over all groups of a small decision process."""
    rules = rules_of("branches:leave_one_branch_out", advantage="rloo")
    np.testing.assert_allclose(expectation(rules, 2), exact(), atol=1e-12)


def visit(rollout: str, reward: float, *pages: str) -> Episode:
    """An agent that answers the question and then each of ``pages``."""
    later = [call(f"{rollout}{i}", rollout, "a", i, messages=news(page)) for i, page in enumerate(pages, start=1)]
    return from_calls([call(f"{rollout}0", rollout, "a", 0), *later], reward)


@pytest.mark.parametrize(
    ("alpha", "x2", "y2"),
    [
        (1.0, (2 / 3 + 2 * 0.5 + 3 * 0.5) / 6, (-1 / 3 - 2 * 0.5 - 3 * 0.5) / 6),
        (0.0, (2 / 3 + 0.5 + 0.5) / 3, (-1 / 3 - 0.5 - 0.5) / 3),
    ],
)
def test_hgpo_against_computed_numbers(alpha: float, x2: float, y2: float):
    """x and y visit P, z visits S, then all visit R; only x succeeds. γ = 0.5: x has 0.25, 0.5 and 1, all others 0.

    Episode: 2/3, −1/3, −1/3 (dr-grpo). The question: mean 1/12. P: ±0.25 with and without the question before it; z was
    alone at S. R: 2/3 and −1/3 among all three, ±0.5 between x and y, which came from P, also by way of the question.
    """
    episodes = [visit("x", 1, "P", "R"), visit("y", 0, "P", "R"), visit("z", 0, "S", "R")]
    rules = rules_of("hgpo:hgpo", gamma=0.5, step_weight=2.0, rewards_args={"alpha": alpha}, advantage="dr-grpo")
    steps = {
        "x0": 1 / 6, "x1": 0.25, "x2": x2, "y0": -1 / 12, "y1": -0.25, "y2": y2, "z0": -1 / 12, "z1": 0, "z2": -1 / 3
    }  # fmt: skip
    credit = assign_credit(episodes, rules)
    assert dict(credit.advantages) == pytest.approx(
        {name: (2 / 3 if name[0] == "x" else -1 / 3) + 2 * step for name, step in steps.items()}
    )
    assert (credit.metrics["step_groups"], credit.metrics["step_groups_single"]) == (4, 1)
    assert (credit.metrics["step_1_groups"], credit.metrics["step_1_groups_single"]) == (7, 5), "first calls have none"
    alone = replace(rules, step_weight=1.0, rewards_args={"alpha": alpha, "episode_weight": 0.0})
    assert dict(assign_credit(episodes, alone).advantages) == pytest.approx(steps)
    explained = explain_credit(episodes, {"policy": alone})
    assert {name: found.advantage for name, found in explained.items()} == pytest.approx(steps)
    assert [group.component for group in explained["z2"].groups] == ["", "step"]


def test_hgpo_leaves_out_levels_without_a_difference():
    """x and y come from P and both succeed: at R only the comparison with z counts, 1 − 2/3 and 0 − 2/3."""
    episodes = [visit("x", 1, "P", "R"), visit("y", 1, "P", "R"), visit("z", 0, "S", "R")]
    rules = rules_of("hgpo:hgpo", gamma=0.5, rewards_args={"episode_weight": 0.0}, advantage="dr-grpo")
    found = assign_credit(episodes, rules).advantages
    assert [found[name] for name in ("x2", "y2", "z2")] == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    assert found["x1"] == found["y1"] == 0
    unchanged = assign_credit(episodes, replace(rules, advantage="none")).advantages
    assert [unchanged[f"x{i}"] for i in range(3)] == pytest.approx([0.25, 0.5, 1]), "all levels have the same value"


def test_the_history_of_an_anchor_is_that_of_the_agent():
    """A call of b in between changes nothing; the first call of an agent has no history."""
    history = import_module("examples.rules.hgpo").AnchorHistory
    with_b = [call("x0", "x", "a", 0), call("x1", "x", "b", 1), call("x2", "x", "a", 2, messages=news("P"))]
    without = [call("y0", "y", "a", 0), call("y1", "y", "a", 1, messages=news("P"))]
    x, y = (history("anchor", 1)(from_calls(calls, 1)) for calls in (with_b, without))
    assert x[2] == y[1]
    assert [*x[:2], y[0]] == ["x0", "x1", "y0"]
    assert history("anchor", 0)(from_calls(with_b, 1))[2] == history("anchor", 0)(from_calls(without, 1))[1]


def test_a_variant_of_igpo_compares_gains_and_rewards_apart():
    """Rewards 1 and 0: ±0.5. Gains of x: 0.4 and −0.1, mean 0.15; of y: 0. Mean of both 0.075."""
    episodes = [attempt("x", 1, [0.1, 0.5, 0.4]), attempt("y", 0, [0.1, 0.1])]
    rules = rules_of(f"{GAINS}:igpo_variant", gamma=0.5, advantage="dr-grpo")
    found = assign_credit(episodes, rules)
    gained = {"x0": 0.325 - 0.5 * 0.175, "x1": -0.175, "x2": 0.0, "y0": -0.075, "y1": 0.0}
    earned = {"x0": 0.125, "x1": 0.25, "x2": 0.5, "y0": -0.25, "y1": -0.5}
    assert found.advantages == pytest.approx({c: gained[c] + earned[c] for c in gained}, abs=1e-6)
    assert found.metrics["gain_groups"] == 1


def test_a2tgpo_compares_at_the_same_turn_and_divides_by_the_root_of_the_terms():
    """Turn 0: gains 0.4 and 0, so ±0.2; turn 1: −0.1 and 0.3, so ∓0.2. x: (0.2 − 0.5 · 0.2) / √2, −0.2."""
    episodes = [attempt("x", 1, [0.1, 0.5, 0.4]), attempt("y", 0, [0.1, 0.1, 0.4])]
    rules = rules_of(f"{GAINS}:a2tgpo", gamma=0.5, advantage="dr-grpo")
    found = assign_credit(episodes, rules)
    first = 0.3 * 0.1 / math.sqrt(2)
    expected = {"x0": 0.5 + first, "x1": 0.5 - 0.06, "x2": 0.5, "y0": -0.5 - first, "y1": -0.5 + 0.06, "y2": -0.5}
    assert found.advantages == pytest.approx(expected, abs=1e-6)
    explained = explain_credit(episodes, {"policy": rules})
    assert {c: e.advantage for c, e in explained.items()} == pytest.approx(expected, abs=1e-6)


def test_a_turn_that_one_attempt_reached_has_the_rewards_alone():
    episodes = [attempt("x", 1, [0.1, 0.5, 0.4]), attempt("y", 0, [0.1, 0.1])]
    rules = rules_of(f"{GAINS}:a2tgpo", advantage="dr-grpo")
    assert assign_credit(episodes, rules).advantages["x1"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["a2tgpo", "igpo_variant"])
def test_a_task_without_an_answer_has_the_credit_of_its_rewards(name: str):
    episodes = [attempt("x", 1, [None, None]), attempt("y", 0, [None, None])]
    found = assign_credit(episodes, rules_of(f"{GAINS}:{name}", advantage="dr-grpo"))
    assert found.advantages == {"x0": 0.5, "x1": 0.5, "y0": -0.5, "y1": -0.5}


def test_tree_adds_the_advantages_within_the_tree_and_within_the_task():
    """Means by rollout: o (0.5 + 1 + 1) / 3 = 5/6, f 0, g 1/2, p 0; of the task 1/3, of the tree 4/9. p's tree has one rollout."""
    found = assign_credit(group(), rules_of("tree:tree", advantage="dr-grpo")).advantages
    assert found == pytest.approx({
        "o0": 1 / 6 + 1 / 18, "o1": 2 / 3 + 5 / 9, "o2": 2 / 3 + 5 / 9, "p0": -1 / 3, "p1": -1 / 3,
        "f1": -1 / 3 - 4 / 9, "f2": -1 / 3 - 4 / 9, "g1": 1 / 6 + 1 / 18,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("name", "credit", "text"),
    [
        ("tree:tree", {}, "credit.rewards: 'tree' uses forks; set rollouts.forks, such as to"),
        (f"{GAINS}:a2tgpo", {}, "credit.rewards: 'a2tgpo' needs credit.information_gain, such as"),
        (
            "hgpo:hgpo",
            {"gamma": 0.9, "information_gain": {"answer": "answer"}},
            "credit.information_gain: goes with rewards: igpo only, but credit.rewards is 'examples.rules.hgpo:hgpo'",
        ),
        ("hgpo:hgpo", {}, "credit.rewards: 'hgpo' needs credit.gamma, such as gamma: 0.95"),
        ("hgpo:hgpo", {"gamma": 0.9, "rewards_args": {"history": -1}}, "rewards_args.history: found -1, expected"),
        ("hgpo:hgpo", {"gamma": 0.9, "rewards_args": {"anchor": "exact"}}, "has its own key; use credit.anchor"),
        (f"{GAINS}:igpo_variant", {"rewards_args": {"measure": "logit"}}, "measure: found 'logit', expected"),
    ],
)
def test_the_configuration_knows_what_they_need(name: str, credit: dict[str, Any], text: str):
    with pytest.raises(ConfigError) as error:
        rules_of(name, needed="measure" in text, **credit)
    assert text in str(error.value)


def test_forks_go_with_a_rule_that_uses_them():
    credit = {"rewards": "examples.rules.hgpo:hgpo", "gamma": 0.9}
    config = load_config({"policy": {"model": "m"}, "credit": credit, "rollouts": {"forks": {}}})
    with pytest.raises(ConfigError, match=r"found 'hgpo', which ignores rollouts.forks; expected one of"):
        policy_rules(config)


def failed_groups(**credit: Any) -> CreditRules:
    credit |= {"advantage": "examples.rules.failed_groups:grpo_failed"}
    (rules,) = policy_rules(load_config({"policy": {"model": "m"}, "credit": credit})).values()
    return rules


def test_failed_groups_are_compared_with_the_batch():
    """Six rollouts, of which one has three calls: μ = 1/2, and σ = 0.5477 with Bessel's correction."""
    rewards = {"one": (1, 0), "two": (0, 0), "three": (1, 1)}
    episodes = [
        episode(f"{task}{n}", earned, "aaa" if (task, n) == ("one", 0) else "a", task=task)
        for task, pair in rewards.items()
        for n, earned in enumerate(pair)
    ]
    found = assign_credit(episodes, failed_groups())
    by_rollout = [found.advantages[f"{e.rollout}0"] for e in episodes]
    assert by_rollout == pytest.approx([0.7071, -0.7071, -0.9129, -0.9129, 0, 0], abs=1e-4)
    assert (found.metrics["groups_equal"], found.metrics["groups_wasted"]) == (2, 1)
    assert failed_groups().needs_batch, "so the viewer recomputes the step, and verl refuses groups one by one"
    by_turn = assign_credit(episodes, failed_groups(group_by=["task", "turn"])).advantages
    assert by_turn["two00"] == pytest.approx(-0.9129, abs=1e-4), "each rollout counts once in the batch"
    assert (by_turn["one01"], by_turn["one02"]) == (0, 0), "turns that one rollout has"


def test_without_a_difference_in_the_batch_failed_groups_get_no_advantage():
    def advantages(*by_task: float, attempts: int = 2) -> list[float]:
        tasks = zip("abc", by_task, strict=False)
        episodes = [episode(f"{task}{n}", value, task=task) for task, value in tasks for n in range(attempts)]
        return list(assign_credit(episodes, failed_groups()).advantages.values())

    assert advantages(0.3, 0.3) == [0] * 4
    below, mean, above = advantages(0.0, 0.1, 0.2)[::2]
    assert (below < 0, mean, above) == (True, 0, 0), "the mean is 0.10000000000000002"
    assert advantages(0.0, 1.0, attempts=1) == [0, 0]
