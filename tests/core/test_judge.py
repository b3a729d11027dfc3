"""The judge's prompt."""

from __future__ import annotations

from typing import Any

from lightning_core.rollouts.judge import judge_prompt
from lightning_core.trace import Trace
from tests.core.episodes import call, from_calls


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
