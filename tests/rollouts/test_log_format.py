"""Log messages on standard error: repeated and long ones are folded."""

from __future__ import annotations

import io
import logging
import uuid

import pytest

from lightning_core.rollouts import failure_log
from lightning_core.rollouts.log_format import FirstOfEach, FoldingFormatter


@pytest.fixture
def printed() -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(FirstOfEach())
    handler.setFormatter(FoldingFormatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("agent")
    logger.addHandler(handler)
    return logger, stream


def test_a_repeated_message_is_printed_the_1st_the_10th_and_the_100th_time(
    printed: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, stream = printed
    for attempt in range(150):
        logger.warning("request %s to %s failed", uuid.UUID(int=attempt), "host")
    logger.warning("another")
    assert stream.getvalue().splitlines() == [
        f"WARNING agent: request {uuid.UUID(int=0)} to host failed",
        f"WARNING agent: request {uuid.UUID(int=9)} to host failed (10 times so far)",
        f"WARNING agent: request {uuid.UUID(int=99)} to host failed (100 times so far)",
        "WARNING agent: another",
    ]


def test_exit_codes_statuses_and_hosts_distinguish_messages(printed: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = printed
    for _ in range(2):
        for what in (1, 137):
            logger.error("the agent ended with exit code %d", what)
        for status in (401, 503):
            logger.error("HTTP %d", status)
        for host in ("10.0.0.1:8000", "10.0.0.2:8000"):
            logger.error("http://%s is down", host)
    assert stream.getvalue().splitlines() == [
        "ERROR agent: the agent ended with exit code 1",
        "ERROR agent: the agent ended with exit code 137",
        "ERROR agent: HTTP 401",
        "ERROR agent: HTTP 503",
        "ERROR agent: http://10.0.0.1:8000 is down",
        "ERROR agent: http://10.0.0.2:8000 is down",
    ]


def test_messages_with_ever_new_numbers_take_few_lines(printed: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = printed
    for number in range(1, 2001):
        logger.warning("row %d took %.1f s", number, number / 10)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["WARNING agent: row 1 took 0.1 s", "WARNING agent: row 2 took 0.2 s"]
    assert lines[9:] == [
        "WARNING agent: row 10 took 1.0 s",
        "WARNING agent: row 100 took 10.0 s (100 times so far)",
        "WARNING agent: row 1000 took 100.0 s (1000 times so far)",
    ]


def test_messages_that_their_caller_counts_are_not_folded_again(
    printed: tuple[logging.Logger, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, stream = printed
    monkeypatch.setattr(failure_log, "logger", logger)
    failures = failure_log.FailureLog()
    for attempt in range(1, 1201):
        failures.retrying("paris", attempt, "HTTP 503")
    assert stream.getvalue().splitlines() == [
        "WARNING agent: task 'paris': attempt 1 failed (HTTP 503); retrying",
        "WARNING agent: task 'paris': attempt 10 failed (HTTP 503); retrying (10 times so far)",
        "WARNING agent: task 'paris': attempt 100 failed (HTTP 503); retrying (100 times so far)",
        "WARNING agent: task 'paris': attempt 1000 failed (HTTP 503); retrying (1000 times so far)",
    ]


def test_the_middle_of_a_long_message_is_left_out(printed: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = printed
    logger.error("\n".join(f"line {n}" for n in range(700)))
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["ERROR agent: line 0", "line 1"]
    assert lines[20] == "… 670 lines more …"
    assert lines[-1] == "line 699"
    assert len(lines) == 31


def test_a_long_line_and_wrong_arguments_do_no_harm(
    printed: tuple[logging.Logger, io.StringIO], capsys: pytest.CaptureFixture[str]
) -> None:
    logger, stream = printed
    logger.error("x" * 100_000)
    assert len(stream.getvalue()) < 2_100
    logger.error("%d", "no number")
    assert "Logging error" in capsys.readouterr().err
