"""What the evidence about an attempt says about its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_core import Call
from lightning_core.errors import (
    CaptureError,
    InfrastructureError,
    RewardError,
    StrayCallError,
    TimeLimitError,
    WholeTimeLimitError,
    describe,
)
from lightning_core.rollouts.outcome import Evidence, classify
from lightning_core.trace import REWARD_FUNCTION
from tests.credit.episodes import call


def answered(sequence: int = 1) -> Call:
    return call(f"c{sequence}", "r", "a", sequence)


def aborted(sequence: int = 2) -> Call:
    return call(f"c{sequence}", "r", "a", sequence, error="CancelledError: the client closed the connection")


def refused(sequence: int = 2, *, agent: str = "a", by: str = "PolicyRequestError: an orphan tool result") -> Call:
    text = None if by.startswith("Upstream") else by.partition(": ")[2]
    return call(f"c{sequence}", "r", agent, sequence, error=by, refused=text)


class ReadTimeout(Exception):
    """As httpx has it: no `TimeoutError`."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


OK, FAILED, INVALID = ("ok", False), ("failed", False), ("invalid", False)
RETRIED, FINAL, TIMEOUT = ("infrastructure", True), ("infrastructure", False), ("timeout", True)
LIMIT = TimeLimitError(10)


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        ({}, OK),
        ({"error": KeyError("x")}, FAILED),
        ({"error": RewardError("nan")}, INVALID),
        ({"failures": ["502"]}, RETRIED),
        ({"failures": ["502"], "error": RewardError("None")}, RETRIED),
        ({"failures": ["502", "401"], "permanent": {"401"}, "error": KeyError("x")}, FINAL),
        ({"permanent": {"401"}}, OK),
        ({"endpoint_gone": True}, FINAL),
        ({"endpoint_gone": True, "error": KeyError("x")}, FINAL),
        ({"unreadable": "two roots"}, RETRIED),
        ({"error": InfrastructureError("the sandbox is down")}, RETRIED),
        ({"error": CaptureError("lost a span")}, RETRIED),
        ({"error": caused(KeyError("x"), StrayCallError("late"))}, RETRIED),
        ({"error": ExceptionGroup("tools", [InfrastructureError("down")])}, RETRIED),
        ({"error": RuntimeError("Cannot send a request, as the client has been closed.")}, RETRIED),
        ({"error": caused(OSError("Connection error."), RuntimeError("Session is closed"))}, RETRIED),
        ({"error": RuntimeError("Event loop is closed")}, RETRIED),
        ({"error": RuntimeError("cannot schedule new futures after shutdown")}, RETRIED),
        ({"error": PermissionError("401: unknown API key: expected the key of a live rollout or of …")}, RETRIED),
        ({"error": LIMIT}, TIMEOUT),
        ({"error": LIMIT, "calls": [answered()]}, FAILED),
        ({"error": LIMIT, "calls": [answered()], "on_timeout": "leave_out"}, TIMEOUT),
        ({"error": LIMIT, "calls": [answered()], "waits": True}, TIMEOUT),
        ({"error": LIMIT, "calls": [answered()], "failures": ["502"]}, RETRIED),
        ({"error": LIMIT, "calls": [aborted()]}, TIMEOUT),
        ({"error": WholeTimeLimitError(100), "calls": [answered()]}, TIMEOUT),
        ({"failures": ["502"], "kinds": {"502": "stream_error"}}, ("stream_error", True)),
        ({"error": TimeoutError(), "calls": [answered()]}, FAILED),
        ({"error": TimeoutError(), "calls": [answered(), aborted()]}, TIMEOUT),
        ({"error": caused(KeyError("x"), ReadTimeout()), "calls": [aborted()]}, TIMEOUT),
        ({"error": TimeoutError(), "calls": [answered()], "waits": True}, TIMEOUT),
        ({"error": KeyError("x"), "calls": [answered(), aborted()]}, FAILED),
        ({"error": TimeoutError(), "calls": [aborted(1), answered(2)]}, FAILED),
        ({"error": KeyError("x"), "calls": [refused()]}, ("refused", False)),
        ({"error": KeyError("x"), "calls": [refused(by="UpstreamRefusal: 400")]}, ("refused", False)),
        ({"error": KeyError("x"), "calls": [refused(by="ContextOverflowError: 9 tokens")]}, ("overflow", False)),
        ({"error": KeyError("x"), "calls": [refused(1), answered(2)]}, FAILED),
        ({"error": KeyError("x"), "calls": [refused(1, agent="b"), answered(2)]}, FAILED),
        (
            {"error": KeyError("400: {'an orphan tool result'}"), "calls": [refused(1, agent="b"), answered(2)]},
            ("refused", False),
        ),
        ({"calls": [refused()]}, OK),
        ({"error": KeyError("x"), "calls": [refused(agent=REWARD_FUNCTION)]}, FAILED),
    ],
)
def test_the_status_and_whether_another_attempt_is_made(evidence: dict[str, Any], expected: tuple[str, bool]) -> None:
    outcome = classify(Evidence(**evidence))
    assert (outcome.status, outcome.retry) == expected
    assert (outcome.error is None) == (outcome.status == "ok")


def wrote(text: str, arguments: str | None = None, *, trained: bool = True) -> Call:
    function = {"name": "add", "arguments": arguments}
    calls = {} if arguments is None else {"tool_calls": [{"id": "c", "type": "function", "function": function}]}
    return replace(answered(), response={"role": "assistant", "content": text, **calls}, trained=trained)


def overflow(*texts: str) -> Call:
    roles = ("user", "assistant", "tool", "assistant", "tool")
    messages = tuple({"role": role, "content": text} for role, text in zip(roles, texts, strict=False))
    return replace(refused(by="ContextOverflowError: the prompt has 99 tokens"), messages=messages)


def echo(turn: dict[str, Any], *, earlier: bool = False) -> Call:
    before = ({"role": "user", "content": "hi"},) if earlier else ()
    by = f"PolicyRequestError: messages.{len(before)}.tool_calls.0.function.arguments nests too deep"
    return replace(refused(by=by), messages=(*before, turn))


LONG, OWN = "x" * 80, [wrote("", "[[1]]")]
CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "[[1]]"}}]}
BLOCKS = {"role": "assistant", "content": [{"type": "tool_use", "name": "add", "input": {"a": 1}}]}


@pytest.mark.parametrize(
    ("calls", "status"),
    [
        ([wrote(LONG), overflow("hi", LONG, "result")], "failed"),
        ([wrote(LONG), overflow(LONG * 9, LONG, "result")], "failed"),
        ([wrote(f"{LONG} {LONG}\n\n"), overflow("hi", f"{LONG}\n{LONG}", "result")], "failed"),
        ([wrote("short"), overflow("hi", "short", LONG)], "overflow"),
        ([wrote("short"), wrote(LONG), overflow("hi", "short", "result", LONG, "ok")], "failed"),
        ([wrote(LONG, trained=False), overflow("hi", LONG, "result")], "overflow"),
        ([wrote("else"), overflow("hi", LONG, "result")], "overflow"),
        ([overflow(LONG)], "overflow"),
        ([*OWN, echo(CALLS)], "failed"),
        ([*OWN, echo(CALLS, earlier=True)], "failed"),
        ([wrote("", "[[2]]"), echo(CALLS)], "refused"),
        ([wrote("", '{"a": 1}'), echo(BLOCKS)], "failed"),
        ([*OWN, refused()], "refused"),
        ([*OWN, replace(refused(), messages=({"role": "user", "content": "hi"}, CALLS))], "refused"),
    ],
)
def test_a_refused_request_counts_only_if_the_models_own_output_caused_it(calls: list[Call], status: str) -> None:
    raised = KeyError("400")
    assert classify(Evidence(error=raised, calls=calls)).status == status
    left = "overflow" if (calls[-1].error or "").startswith("ContextOverflow") else "refused"
    for how, expected in (("fail", "failed"), ("mask", "masked"), ("leave_out", left)):
        outcome = classify(Evidence(error=raised, calls=calls, on_refused=how))
        assert (outcome.status, outcome.retry) == (expected, False)


def test_a_caught_refusal_of_another_agent_is_not_taken_for_the_one_that_ended_the_attempt() -> None:
    """Of two last requests that were refused, the exception is about the last one, which filled the context."""
    caught = replace(refused(), agent="helper")
    assert classify(Evidence(error=KeyError("400"), calls=[caught, overflow(LONG)])).status == "overflow"


def test_the_error_names_what_cannot_be_avoided_and_the_first_cause() -> None:
    assert classify(Evidence(failures=["502", "401"], permanent={"401"})).error == "401"
    closed = classify(Evidence(error=caused(OSError("Connection error."), RuntimeError("Session is closed"))))
    assert closed.error == "OSError: Connection error. (caused by RuntimeError: Session is closed)"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("half \ud83d of it"), "ValueError: half \\ud83d of it"),
        (Unspeakable(), "Unspeakable: (a Unspeakable; showing it raised ValueError)"),
        (ValueError(), "ValueError"),
        (ValueError("a  b\nc"), "ValueError: a b c"),
    ],
)
def test_any_exception_can_be_described(error: Exception, text: str) -> None:
    assert describe(error) == text


def test_a_long_text_is_folded_to_its_beginning_and_end() -> None:
    text = describe(ValueError("begin " + "x " * 5_000_000 + "end"))
    assert text.startswith("ValueError: begin x")
    assert text.endswith("x end")
    assert "… (10000009 characters) …" in text
    assert len(text) < 600
