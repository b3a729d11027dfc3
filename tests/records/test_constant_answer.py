"""The best constant answer: by the reward function, by recorded rewards, and when it cannot be computed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_core import trace as tr
from lightning_core.records.statistics import constant_answer
from lightning_core.records.statistics.constant_answer import AnswersOfRun, GivenAnswer, compare_answers, reward_problem
from lightning_core.records.store import Store
from tests.records.test_ledger import record, spans

TASKS = [{"id": f"t{i}", "gold": "yes" if i % 3 else "no"} for i in range(12)]
"""Eight tasks with the answer yes, four with no."""


def right(task: Mapping[str, Any], answer: str) -> float:
    return float(answer == task["gold"])


async def right_later(task: Mapping[str, Any], answer: str) -> float:
    return right(task, answer)


def given(phase: str, answers: Sequence[str], *, returned: bool, rewards: Sequence[float] = ()) -> list[GivenAnswer]:
    """One answer to each task."""
    own = rewards or [right(task, answer) for task, answer in zip(TASKS, answers, strict=True)]
    return [
        GivenAnswer(phase, 0, task["id"], json.dumps(answer) if returned else answer, returned, reward)
        for task, answer, reward in zip(TASKS, answers, own, strict=True)
    ]


def compared(
    before: Sequence[str],
    after: Sequence[str],
    *,
    score: Callable[[Any, Any], Any] | None = None,
    rewards: Sequence[float] = (),
) -> AnswersOfRun:
    answers = given("eval_before", before, returned=score is not None)
    last = given("eval_after", after, returned=score is not None, rewards=rewards)
    return compare_answers([*answers, *last], {g.task: [g.reward] for g in last}, TASKS, score)


BEFORE = [f"text {i}" for i in range(10)] + ["yes", "no"]
COLLAPSED = ["yes"] * 12
LEARNED = [task["gold"] for task in TASKS]


@pytest.mark.parametrize(
    ("score", "source"),
    [
        pytest.param(right, "reward function", id="asked"),
        pytest.param(right_later, "reward function", id="asynchronous"),
        pytest.param(None, "recorded", id="recorded"),
    ],
)
def test_an_agent_that_always_gives_the_best_answer_does_not_beat_it(score: Any, source: str) -> None:
    found = compared(BEFORE, COLLAPSED, score=score)
    assert found.distinct is not None
    assert (found.distinct.before, found.distinct.after, found.distinct.rollouts_after) == (12, 1, 12)
    constant = found.constant
    assert constant is not None
    assert (constant.answer.strip('"'), constant.source, constant.known) == ("yes", source, 12)
    assert (constant.reward, constant.lead, constant.is_beaten) == (pytest.approx(8 / 12), 0, False)
    assert found.problem is None


def test_an_agent_that_reads_its_tasks_beats_it_with_the_reward_function() -> None:
    many = [{**task, "id": f"{task['id']}-{copy}"} for task in TASKS for copy in range(4)]
    answers = [GivenAnswer("eval_after", 3, t["id"], json.dumps(t["gold"]), True, 1.0) for t in many]
    found = compare_answers(answers, {g.task: [g.reward] for g in answers}, many, right).constant
    assert found is not None
    assert (found.reward, found.lead, found.is_beaten) == (pytest.approx(8 / 12), pytest.approx(4 / 12), True)


def test_recorded_rewards_are_a_lower_bound() -> None:
    """Nobody answered yes where no is right, so these tasks count with the lowest reward, as they should here."""
    constant = compared(BEFORE, LEARNED).constant
    assert constant is not None
    assert (constant.answer, constant.reward, constant.known) == ("yes", pytest.approx(8 / 12), 8)


def test_a_reward_that_depends_on_more_than_the_answer_is_not_asked() -> None:
    found = compared(BEFORE, COLLAPSED, score=right, rewards=[0.5] * 12)
    assert found.problem == "the reward function depends on more than the task and the answer"
    assert found.constant is not None
    assert found.constant.source == "recorded"


def test_a_slow_reward_function_is_asked_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant_answer, "_SECONDS", 0.05)
    found = compared(BEFORE, COLLAPSED, score=lambda task, answer: time.sleep(30))
    assert found.problem == "the reward function needs more than 0.05 s for 12 tasks"


@pytest.mark.parametrize(
    ("operation", "agent"), [("chat", tr.REWARD_FUNCTION), (tr.ELSEWHERE, tr.REWARD_FUNCTION), ("chat", "a")]
)
def test_a_reward_function_that_made_model_calls_is_not_called(tmp_path: Path, operation: str, agent: str) -> None:
    with Store(tmp_path / "store.db") as store:
        store.add_rollout(record("1" * 32), spans("1" * 32, [({tr.OPERATION: operation, tr.AGENT: agent}, None)]))
        problem = reward_problem(store)
    assert problem == ("the reward function makes model calls" if agent == tr.REWARD_FUNCTION else None)
    last = given("eval_after", COLLAPSED, returned=True)
    found = compare_answers(last, {g.task: [g.reward] for g in last}, TASKS, right, problem)
    assert found.problem == problem
    assert found.constant is not None
    assert found.constant.source == ("reward function" if problem is None else "recorded")


def test_a_reward_function_that_fails_is_a_reason() -> None:
    found = compared(BEFORE, COLLAPSED, score=lambda task, answer: 1 / 0)
    assert found.problem == "the reward function raised ZeroDivisionError: division by zero"


def test_the_number_of_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counting(task: Mapping[str, Any], answer: str) -> float:
        calls.append(answer)
        return right(task, answer)

    monkeypatch.setattr(constant_answer, "_MOST_CALLS", 24)
    constant = compared(BEFORE, LEARNED, score=counting).constant
    assert constant is not None
    assert (constant.compared, len(calls), set(calls)) == (2, 24, {"yes", "no"})


def test_answers_that_were_given_once_are_no_constant_answers() -> None:
    found = compared([f"a {i}" for i in range(12)], [f"b {i}" for i in range(12)])
    assert (found.constant, found.problem) == (None, "no answer occurred for more than one task")
