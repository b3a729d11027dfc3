"""What is logged about attempts that fail, and which lines of the program are shown."""

from __future__ import annotations

import pytest

from lightning_core.errors import explain
from lightning_core.rollouts.executors import failures
from lightning_core.rollouts.failure_log import FailureLog
from lightning_core.rollouts.outcome import Outcome


def test_after_ten_reasons_one_line_says_where_the_others_are(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for letter in "abcdefghijkl" * 2:
        error = failures.load(failures.dump(ValueError(f"reason {letter}")))
        log.raised("paris", Outcome(status="failed", error=f"ValueError: reason {letter}"), error)
    messages = caplog.messages
    assert [text.splitlines()[-1] for text in messages[:10]] == [f"  ValueError: reason {c}" for c in "abcdefghij"]
    assert messages[10:] == [
        "task 'paris' failed for a new reason; the log has only the first 10. To list all failures: "
        "lightning-rl trace RUN --status failed"
    ]


def _raise(name: str, source: str) -> BaseException:
    """The exception that ``source``, in the file ``name``, raises."""
    try:
        exec(compile(source, name, "exec"), {})
    except Exception as error:  # noqa: BLE001
        error.__traceback__ = None if error.__traceback__ is None else error.__traceback__.tb_next  # not this file
        return error
    raise AssertionError(source)


def test_an_exception_raised_from_none_is_not_explained_by_the_one_it_replaces() -> None:
    inner = _raise("/home/me/agent.py", "{}['hidden']")
    library = "/venv/lib/site-packages/library.py"
    shown = _raise(library, "raise ValueError('seen')")
    shown.__context__ = inner
    assert "/home/me/agent.py:1" in explain(shown)
    shown.__suppress_context__ = True
    assert explain(shown) == "  ValueError: seen"
    shown.__cause__ = inner
    assert "/home/me/agent.py:1" in explain(shown)


def test_exceptions_that_compare_equal_are_still_distinct() -> None:
    class Equal(Exception):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    outer, inner = Equal("outer"), _raise("/home/me/agent.py", "1 / 0")
    outer.__cause__ = inner
    assert "/home/me/agent.py:1" in explain(outer)


@pytest.mark.parametrize("folder", ["/venv/lib/site-packages", "/usr/lib/python3/dist-packages"])
def test_lines_of_installed_packages_are_left_out(folder: str) -> None:
    assert explain(_raise(f"{folder}/library.py", "1 / 0")) == "  ZeroDivisionError: division by zero"
