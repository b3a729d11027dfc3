"""Intermediate rewards against hand-computed numbers, and as a signal of a run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_core import Call, Config, CreditRules, Episode, assign_credit, load_config
from lightning_core.credit import assign_by_policy
from lightning_core.errors import ConfigError
from lightning_core.rollouts.counts import add_counts, count_calls, count_rewards, count_rollouts, counts_to_metrics
from lightning_core.signals.air.keys import Air, CallReward, Format, Rule
from lightning_core.signals.air.rewards import with_air, with_air_of
from lightning_core.signals.air.signal import AirSignal
from lightning_core.signals.air.tool_outcomes import ToolOutcome
from lightning_core.trace import Reward
from tests.credit.episodes import call, calls_tools, episode, from_calls, tool

EXPLICIT = CreditRules(rewards="explicit")


def values(one: Episode, air: Air, rules: CreditRules = EXPLICIT, functions: Sequence[CallReward] = ()) -> list[float]:
    """Values of ``one``'s calls."""
    credit = assign_credit(with_air([one, episode("y", 0)], air, functions, solved=1.0), rules)
    return [credit.values[t.call] for t in one.transitions]


def worked() -> Episode:
    """Agent a calls three tools: one works, one fails, one never runs. Then its answer is cut off."""
    calls = [
        call("x0", "x", "a", 0, response=calls_tools("1", "2", "3")),
        call("x1", "x", "a", 1, finish_reason="length", response={"role": "assistant", "content": "Answer:\n 42"}),
    ]
    events = [tool("search", "1", 1), tool("search again", "2", 1, error="TimeoutError: too slow")]
    return from_calls(calls, 1, events=events)


def test_air_against_computed_numbers():
    air = Air(tool_ok=0.1, tool_error=-0.2, tool_unused=-0.4, truncated=-1.0)
    assert values(worked(), air) == pytest.approx([0.1 - 0.2 - 0.4, -1.0])
    broadcast = values(worked(), air, CreditRules())
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
    assert values(from_calls([one], 1), Air(truncated=-0.5, truncated_ramp=20)) == pytest.approx([expected])


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
    assert values(lengthy("x", 1, 120, 40), air) == pytest.approx([-0.12 - 0.05, -0.04 - 0.05])
    assert values(lengthy("x", 1, 120, 40), air, CreditRules()) == pytest.approx([0.74, 0.74])
    assert values(lengthy("x", 1, 120, trained=("a", "b")), air) == pytest.approx([-0.17, -1.05])


def test_the_shorter_of_two_perfect_rollouts_is_better_with_a_cost_and_grpo_makes_the_difference_as_large_as_any():
    """Returns of 0.9 and 0.7: their mean is 0.8, so dr-grpo gives ±0.1, but grpo divides by 0.1 · √2."""
    pair = [lengthy("x", 1, 100), lengthy("y", 1, 100, 100, 100)]
    costly = with_air(pair, Air(call_cost=0.1), solved=1.0)
    plain = assign_credit(costly, CreditRules(advantage="dr-grpo")).advantages
    assert [plain["x0"], plain["y0"], plain["y2"]] == pytest.approx([0.1, -0.1, -0.1])
    scaled = assign_credit(costly, CreditRules()).advantages
    assert [scaled["x0"], scaled["y0"]] == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)], abs=1e-4)
    assert set(assign_credit(pair, CreditRules()).advantages.values()) == {0.0}


@pytest.mark.parametrize(
    ("rewards", "counted"),
    [((0, 0), False), ((0.3, 0.3), False), ((-2, -2), False), ((1, 1), True), ((0, 1), True), ((-2, -1.5), True)],
)
def test_shaping_counts_where_an_attempt_is_solved_or_better_than_another(rewards: tuple[float, float], counted: bool):
    """x is shorter by 2 calls and cut off. The outcomes of tools count in any case."""
    air = Air(
        call_cost=0.1, token_cost=0.001, truncated=-0.2, tool_error=-0.5, formats=(Format(pattern="a", weight=0.1),)
    )
    long, short = lengthy("x", rewards[0], 100, 100, 100), lengthy("y", rewards[1], 100)
    others = [episode("z", 1, task="other"), episode("w", 0, task="other")]
    added = [found.rewards[1:] for found in with_air([long, short, *others], air, solved=1.0)[:2]]
    assert [bool(own) for own in added] == [counted, counted]
    always = with_air([long, short], air.model_copy(update={"gate": False}), solved=1.0)
    assert all(found.rewards[1:] for found in always)
    broken = from_calls([call("v0", "v", "a", 0, response=calls_tools("1"))], 0, events=[tool("t", "1", 1, error="no")])
    assert [r.value for r in with_air([broken, episode("w", 0)], air, solved=1.0)[0].rewards[1:]] == [-0.5]


def test_a_single_attempt_is_shaped_if_it_is_solved_whatever_else_is_in_the_batch():
    batch = [episode("x", 0, task="1"), episode("y", 0.5, task="2"), episode("z", 1, task="3")]
    assert [len(found.rewards) for found in with_air(batch, Air(call_cost=0.1), solved=1.0)] == [1, 1, 2]


def test_neither_rounding_nor_the_scores_of_a_judge_are_success():
    """1e6 + 0.1 − 1e6 is 0.1 up to rounding. A judge's scores hardly ever agree."""
    rounded = [episode("x", 0.1), episode("y", 1e6, extra=(Reward(value=0.1), Reward(value=-1e6)))]
    judged = [episode(f"j{s}", 0, task="u", extra=(Reward(value=s, name="judge"),)) for s in (0.12, 0.13, 1.5)]
    section = {"air": {"call_cost": 0.1}, "judge": {"model": "base"}}
    credit = load_config({"policy": {"model": "m"}, "credit": section}).credit
    before = [*rounded, *judged]
    assert list(map(len, (e.rewards for e in with_air_of(credit, before, solved=1.0)))) == [
        len(e.rewards) for e in before
    ]


def test_groups_that_differ_in_intermediate_rewards_alone_are_counted() -> None:
    """Of three groups, one fails, one succeeds, and one is decided by the task; a single attempt is no group."""
    rewards = {"failed": (0, 0), "solved": (1, 1), "decided": (0, 1)}
    episodes = [lengthy(f"{t}{i}", r, *[9] * (i + 1)) for t, own in rewards.items() for i, r in enumerate(own)]
    episodes = [replace(e, trace=replace(e.trace, task_id=e.rollout[:-1])) for e in episodes]
    for gate, alone in ((True, 1), (False, 2)):
        signal = AirSignal(settings=Air(call_cost=0.1, gate=gate), functions=(), solved=1.0, policies=())
        found = annotated(signal, [*episodes, episode("single", 1, task="single")])
        assert metrics_of(found, signal.streams(found).counts)["air_alone"] == alone / 3


@pytest.mark.parametrize(("placed", "alone"), [((0, 0), 0), ((0, 1), 0), ((0, None), 1)])
def test_the_places_of_equal_intermediate_rewards_do_not_count(placed: tuple[int, int | None], alone: int) -> None:
    """Each attempt's tool fails in its first or in its second call, or in none."""

    def attempt(rollout: str, at: int | None) -> Episode:
        calls = [
            call(f"{rollout}{i}", rollout, "a", i, **({"response": calls_tools("1")} if i == at else {}))
            for i in range(2)
        ]
        return from_calls(calls, 1, events=() if at is None else [tool("t", "1", at + 1, error="no")])

    signal = AirSignal(settings=Air(tool_error=-0.5), functions=(), solved=1.0, policies=())
    found = annotated(signal, [attempt(name, at) for name, at in zip("xy", placed, strict=True)])
    assert signal.streams(found).counts["air_alone_sum"] == alone


def test_air_distinguishes_errors():
    air = Air(tool_error=-0.2, tool_errors={"Permission": -5.0, "Timeout": 0.0})
    assert values(worked(), air) == [0.0, 0.0]


def wrong_arguments(call: Call) -> float:
    return 0.0


def wrong_inside(call: Call, tools: object) -> float:
    return float(call.response["score"])  # type: ignore[index]


def test_a_custom_rule_that_cannot_be_called_or_fails_is_an_error_with_its_key():
    def rewarded(function: Callable[..., float]) -> Sequence[Episode]:
        section = {"air": {"rules": [{"function": f"{__name__}:{function.__name__}"}]}}
        return with_air_of(load_config({"policy": {"model": "m"}, "credit": section}).credit, [worked()], solved=1.0)

    message = r"credit.air.rules\[0\].function: .*wrong_arguments\(call.*cannot be called as function\(call, tools\)"
    with pytest.raises(ConfigError, match=message):
        rewarded(wrong_arguments)
    with pytest.raises(
        ConfigError, match=r"credit.air.rules\[0\].function: .*:wrong_inside failed:\n.*\n  KeyError: 'score'"
    ):
        rewarded(wrong_inside)


def test_formats_and_custom_rules():
    def wordy(one: Call, tools: object) -> float:
        assert isinstance(tools, list)
        assert all(isinstance(outcome, ToolOutcome) for outcome in tools)
        return float(len(tools))

    formats = (Format(pattern=r"^Answer:.*42$", weight=0.5), Format(pattern="42", weight=9.0, agents=("b",)))
    air = Air(formats=formats, rules=(Rule(function="module:wordy", weight=0.1),))
    assert values(worked(), air, functions=[wordy]) == pytest.approx([0.3, 0.5])


def team(rollout: str, reward: float) -> Episode:
    """A call of the policy sql and one of critic; both reached their limit."""
    calls = [
        call(f"{rollout}1", rollout, "writer", 0, model="sql", finish_reason="length"),
        call(f"{rollout}2", rollout, "critic", 1, model="critic", finish_reason="length"),
    ]
    return from_calls(calls, reward)


def annotated(signal: AirSignal, episodes: Sequence[Episode]) -> Sequence[Episode]:
    return asyncio.run(signal.annotate(episodes, {}, 0, required=True))


def metrics_of(episodes: Sequence[Episode], counts: Any, policies: Sequence[str] = ()) -> dict[str, float]:
    """The metrics of a step with ``episodes``, to which the signal's ``counts`` are added."""
    credit = assign_by_policy(episodes, dict.fromkeys(policies or ["policy"], CreditRules()))
    own = {**count_rollouts([]), "rows": 1, **count_calls(episodes, credit, policies), **count_rewards(episodes)}
    return counts_to_metrics(add_counts(own, counts))


def test_the_rewards_are_a_mean_over_rollouts_whether_or_not_there_are_any() -> None:
    signal = AirSignal(settings=Air(truncated=-0.5), functions=(), solved=1.0, policies=())
    cut, whole = annotated(signal, [team("a", 1.0), episode("b", 1.0)])
    assert (len(cut.rewards), len(whole.rewards)) == (3, 1)
    found = metrics_of([cut, whole], signal.streams([cut, whole]).counts)
    assert [(name, value) for name, value in found.items() if name.startswith("reward_")] == [("reward_air", -0.5)]
    assert metrics_of([whole], signal.streams([whole]).counts)["reward_air"] == 0.0


def test_the_rewards_are_counted_for_each_policy_and_shared_by_all() -> None:
    signal = AirSignal(settings=Air(truncated=-0.5), functions=(), solved=1.0, policies=("sql", "critic"))
    episodes = annotated(signal, [team("a", 1.0), team("b", 1.0)])
    found = metrics_of(episodes, signal.streams(episodes).counts, ("sql", "critic"))
    assert (found["sql/reward_air"], found["critic/reward_air"]) == (-0.5, -0.5)
    assert "reward_air" not in found
    values = assign_by_policy(episodes[:1], {"sql": CreditRules(), "critic": CreditRules()}).values
    assert values == {"a1": 0.0, "a2": 0.0}, "1 − 2 · 0.5"


def test_recorded_rollouts_get_the_rewards_of_the_configuration() -> None:
    def config(**credit: Any) -> Config:
        return load_config({"policy": {"model": "m"}, "credit": credit})

    (found,) = with_air_of(config(air={"truncated": -0.5}).credit, [team("a", 1.0)], solved=1.0)
    assert [(r.call, r.value) for r in found.rewards[1:]] == [("a1", -0.5), ("a2", -0.5)]
    assert list(with_air_of(config().credit, [found], solved=1.0)) == [found]
