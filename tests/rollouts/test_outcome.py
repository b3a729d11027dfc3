"""What the evidence about an attempt says about its end."""

from __future__ import annotations

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
