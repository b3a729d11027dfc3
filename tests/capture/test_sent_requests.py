"""The failures of model requests as their clients see them."""

from __future__ import annotations

from lightning_core.capture.sent_requests import SentKey, SentRequests


def key(number: int) -> SentKey:
    return "writer", "http://host/v1/chat/completions", number


def test_failures_after_the_first_ones_are_kept_when_those_recover() -> None:
    sent = SentRequests()
    for number in range(30):
        sent.fail(key(number), f"failure {number}")
    assert len(sent.unanswered) == 21
    assert sent.unanswered[-1] == "10 more model requests had no response"
    assert sum(sent.recover(key(number)) for number in range(20)) == 20
    assert sent.unanswered == ["10 more model requests had no response"]
    assert sum(sent.recover(key(number)) for number in range(20, 30)) == 10
    assert not sent.has_failed
    assert sent.unanswered == []


def test_all_failures_of_a_request_recover_together_and_texts_are_kept_again() -> None:
    sent = SentRequests()
    for number in range(30):
        sent.fail(key(0), f"failure {number}")
    assert sent.recover(key(0)) == 30
    assert sent.recover(key(0)) == 0
    sent.fail(key(1), "the next one")
    assert sent.unanswered == ["the next one"]
