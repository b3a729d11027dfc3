"""Each reward rule, group key and advantage rule against hand-computed numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_core import Call, CreditRules, Episode, assign_credit, load_config
from lightning_core.config.build_rules import policy_rules
from lightning_core.credit import Air, FormatRule
from lightning_core.credit.gae import turn_gae
from lightning_core.credit.tool_outcomes import ToolOutcome
from lightning_core.errors import ConfigError, CreditError, RewardError
from lightning_core.trace import Reward
from tests.credit.episodes import call, calls_tools, episode, from_calls, tool

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


def worked(**changes: str) -> Episode:
    """Agent a calls three tools: one works, one fails, one never runs. Then its answer is cut off."""
    calls = [
        call("x0", "x", "a", 0, response=calls_tools("1", "2", "3")),
        call("x1", "x", "a", 1, finish_reason="length", response={"role": "assistant", "content": "Answer:\n 42"}),
    ]
    events = [tool("search", "1", 1), tool("search again", "2", 1, error="TimeoutError: too slow")]
    return from_calls(calls, 1, events=events)


def test_air_against_computed_numbers():
    air = Air(tool_ok=0.1, tool_error=-0.2, tool_unused=-0.4, truncated=-1.0)
    assert values(worked(), CreditRules(rewards="explicit", air=air)) == pytest.approx([0.1 - 0.2 - 0.4, -1.0])
    broadcast = values(worked(), CreditRules(air=air))
    assert broadcast == pytest.approx([1 - 0.5 - 1.0] * 2), "rewards on calls count towards the return"


@pytest.mark.parametrize(
    ("tokens", "limit", "finish", "expected"),
    [
        (80, 100, "stop", 0.0),
        (90, 100, "stop", -0.25),
        (95, 100, "tool_calls", -0.375),
        (100, 100, "stop", -0.5),
        (40, 40, "length", -0.5),
        (30, 40, "stop", -0.25),
        (95, None, "stop", 0.0),
        (95, None, "length", -0.5),
    ],
)
def test_air_of_long_responses_grows_before_the_limit(tokens: int, limit: int | None, finish: str, expected: float):
    """DAPO's soft overlong penalty over the last 20 tokens: (limit − 20 − tokens) / 20, times 0.5."""
    one = call("x", "x", "a", 0, finish_reason=finish, max_tokens=limit, output_ids=np.zeros(tokens, dtype="<u4"))
    rules = CreditRules(rewards="explicit", air=Air(truncated=-0.5, truncated_ramp=20))
    assert values(from_calls([one], 1), rules) == pytest.approx([expected])


def lengthy(rollout: str, reward: float, *tokens: int, trained: tuple[str, ...] = ("a",)) -> Episode:
    """Calls of the agent a with these numbers of tokens, then one of b with 1,000."""
    calls = [
        call(f"{rollout}{i}", rollout, "b" if i == len(tokens) else "a", i, output_ids=np.zeros(n, dtype="<u4"))
        for i, n in enumerate((*tokens, 1000))
    ]
    return from_calls(calls, reward, trained=trained)


def test_the_costs_of_tokens_and_calls_against_computed_numbers():
    """Only trained calls cost: 1 − (120 + 40) · 0.001 − 2 · 0.05 = 0.74 of the return."""
    air = Air(token_cost=0.001, call_cost=0.05)
    own = values(lengthy("x", 1, 120, 40), CreditRules(rewards="explicit", air=air))
    assert own == pytest.approx([-0.12 - 0.05, -0.04 - 0.05])
    assert values(lengthy("x", 1, 120, 40), CreditRules(air=air)) == pytest.approx([0.74, 0.74])
    both = CreditRules(rewards="explicit", air=air)
    assert values(lengthy("x", 1, 120, trained=("a", "b")), both) == pytest.approx([-0.17, -1.05])


def test_the_shorter_of_two_perfect_rollouts_is_better_with_a_cost_and_grpo_makes_the_difference_as_large_as_any():
    """Returns of 0.9 and 0.7: their mean is 0.8, so dr-grpo gives ±0.1, but grpo divides by 0.1 · √2."""
    pair = [lengthy("x", 1, 100), lengthy("y", 1, 100, 100, 100)]
    air = Air(call_cost=0.1)
    plain = assign_credit(pair, CreditRules(advantage="dr-grpo", air=air)).advantages
    assert [plain["x0"], plain["y0"], plain["y2"]] == pytest.approx([0.1, -0.1, -0.1])
    scaled = assign_credit(pair, CreditRules(air=air)).advantages
    assert [scaled["x0"], scaled["y0"]] == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)], abs=1e-4)
    assert set(assign_credit(pair, CreditRules()).advantages.values()) == {0.0}


def test_air_distinguishes_errors():
    air = Air(tool_error=-0.2, tool_errors={"Permission": -5.0, "Timeout": 0.0})
    assert values(worked(), CreditRules(rewards="explicit", air=air)) == [0.0, 0.0]


def wrong_arguments(call: Call) -> float:
    return 0.0


def wrong_inside(call: Call, tools: object) -> float:
    return float(call.response["score"])  # type: ignore[index]


def test_a_rule_of_air_that_cannot_be_called_or_fails_is_an_error_with_its_key():
    def air(function: Callable[..., float]) -> CreditRules:
        section = {"air": {"rules": [{"function": f"{__name__}:{function.__name__}"}]}}
        (rules,) = policy_rules(load_config({"policy": {"model": "m"}, "credit": section})).values()
        return rules

    message = r"credit.air.rules\[0\].function: .*wrong_arguments\(call.*cannot be called as function\(call, tools\)"
    with pytest.raises(ConfigError, match=message):
        air(wrong_arguments)
    with pytest.raises(
        ConfigError, match=r"credit.air.rules\[0\].function: .*:wrong_inside failed:\n.*\n  KeyError: 'score'"
    ):
        assign_credit([worked()], air(wrong_inside))


def test_a_rule_of_ones_own_that_fails_is_an_error_with_its_place():
    def divided(episode: Episode) -> list[float]:
        return [1 / 0] * len(episode.transitions)

    with pytest.raises(
        CreditError,
        match=r"the function 'divided' failed:\n  .*test_credit_rules.py:\d+, in divided: .*\n  ZeroDivisionError",
    ):
        assign_credit([worked()], CreditRules(rewards=divided))

    def ends_in_a_library(episode: Episode, gamma: float) -> list[float]:
        return [float(np.stack([]).sum())]

    with pytest.raises(
        CreditError, match=r"'ends_in_a_library' failed:\n  .*in ends_in_a_library: .*\n  ValueError: need"
    ):
        assign_credit([worked()], CreditRules(rewards=ends_in_a_library))


def test_a_rule_of_ones_own_without_values_is_an_error():
    with pytest.raises(CreditError, match="the reward rule 'nothing' returned None; expected one value per call"):
        assign_credit([worked()], CreditRules(rewards=nothing))


def nothing(episode: Episode) -> None:
    """A rule that forgets to return."""


def test_air_of_formats_and_of_ones_own_rules():
    def wordy(one: Call, signals: object) -> float:
        assert isinstance(signals, list)
        assert all(isinstance(s, ToolOutcome) for s in signals)
        return float(len(signals))

    formats = [FormatRule(pattern=r"^Answer:.*42$", weight=0.5), FormatRule(pattern="42", weight=9.0, agents=["b"])]
    rules = CreditRules(rewards="explicit", air=Air(formats=formats, rules=[(wordy, 0.1)]))
    assert values(worked(), rules) == pytest.approx([0.3, 0.5])
