"""The judge's prompt."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_core import Trace
from lightning_core.signals.judge.scores import judge_group, judge_prompt, read_scores
from lightning_core.signals.judge.section import Criterion, Judge
from tests.credit.episodes import call, from_calls
from tests.endpoint.serving import serve


def assistant_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def conversation(rollout: str, *answers: str) -> Trace:
    """The user says "more" after each answer; every prompt contains the whole conversation so far."""
    messages: list[dict[str, Any]] = [user_message("tell me")]
    calls = []
    for i, answer in enumerate(answers):
        calls.append(
            call(f"{rollout}{i}", rollout, "a", i, messages=tuple(messages), response=assistant_message(answer))
        )
        messages += [assistant_message(answer), user_message("more")]
    return from_calls(calls, 0).trace


def shown(trace: Trace) -> list[str]:
    lines = judge_prompt([trace], None).splitlines()
    return [line for line in lines if line.startswith(("user:", "assistant (a):"))]


def test_a_repeated_response_is_shown_again():
    expected = ["user: tell me", *["assistant (a): hm", "user: more"] * 4, "assistant (a): hm"]
    assert shown(conversation("x", *["hm"] * 5)) == expected


def test_the_history_of_later_calls_is_shown_once():
    expected = [
        "user: tell me",
        "assistant (a): one",
        "user: more",
        "assistant (a): two",
        "user: more",
        "assistant (a): three",
    ]
    assert shown(conversation("x", "one", "two", "three")) == expected


def test_the_same_answer_to_the_same_question_in_calls_of_their_own():
    calls = [
        call(f"x{i}", "x", "a", i, messages=(user_message("tell me"),), response=assistant_message("hm"))
        for i in range(3)
    ]
    assert shown(from_calls(calls, 0).trace) == ["user: tell me", *["assistant (a): hm"] * 3]


def test_attempts_with_a_common_start_differ_where_one_continues():
    prompt = judge_prompt([conversation("x", "hm", "hm"), conversation("y", "hm")], None)
    head, first, second = prompt.split("--- Attempt ")
    assert "assistant (a): hm" in head
    assert "assistant (a): hm" in first
    assert "assistant (a): hm" not in second


def test_a_judge_that_does_not_respond_in_time_is_an_error():
    attempts = [from_calls([call(r, r, "a", 0, response=assistant_message("hm"))], 0) for r in ("x", "y")]
    with serve(delay=60) as endpoint:
        result = judge_group(attempts, Judge(model="base", timeout_seconds=0.1), endpoint, step=0)
    assert result.scores == {}
    assert "Timeout" in (result.error or "")


CRITERIA = [
    Criterion(name="right", text="The answer is 4."),
    Criterion(name="short", text="One word.", agents=("a", "b")),
]


def test_the_prompt_lists_each_criterion_and_its_place_in_the_answer():
    lines = judge_prompt([conversation("x", "four"), conversation("y", "five")], CRITERIA).splitlines()
    assert lines[0].endswith("by comparing them, separately by each criterion:")
    assert lines[1:3] == ["- right: The answer is 4.", "- short (only what a and b wrote): One word."]
    numbers = "[2 whole numbers, one for each attempt in order]"
    assert lines[-1] == f'Answer as JSON: {{"right": {numbers}, "short": {numbers}}}'


def test_the_scores_of_each_criterion_are_read():
    answer = 'Sure: {"short": [0, 5], "right": [10, 2]}'
    assert read_scores(answer, 2, ["right", "short"]) == {"right": [1.0, 0.2], "short": [0.0, 0.5]}
    assert read_scores('{"scores": [1, 2]}', 2) == {"scores": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"right": [1, 2]}', "expected 2 scores under 'short'"),
        ('{"right": [1, 2], "short": [1]}', "expected 2 scores under 'short'"),
        ('{"right": [1, 2], "short": [1, 11]}', r"the scores \[1, 11\]; expected numbers from 0 to 10"),
        ('{"scores": [1, 2]}', "expected 2 scores under 'right'"),
    ],
)
def test_an_answer_without_all_scores_is_an_error(answer: str, expected: str):
    with pytest.raises(ValueError, match=expected):
        read_scores(answer, 2, ["right", "short"])
