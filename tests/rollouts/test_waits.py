"""What counts as waiting for others: of an agent for a processor, for the endpoint, and both at once."""

from __future__ import annotations

import time

import pytest

from lightning_core.endpoint.waiting import WaitingTime
from lightning_core.errors import WholeTimeLimitError
from lightning_core.rollouts.executors.groups import ProcessorWait
from lightning_core.rollouts.executors.time_limit import TimeLimit


def test_a_thread_that_has_waited_long_does_not_hide_another() -> None:
    """Thread 1 has waited for 1.6 s before. Thread 2 begins later and waits for 1.0 s. Thread 3 ends, and its id is used again."""
    readings = iter([{1: 1.6, 3: 0.9}, {1: 1.6, 3: 0.9}, {1: 1.7, 2: 1.0, 3: 0.4}, {1: 1.7}])
    waited = ProcessorWait(lambda: next(readings))
    assert [waited() for _ in range(3)] == pytest.approx([0.0, 1.0, 0.1])


def test_waits_that_overlap_do_not_exceed_the_time_that_passed() -> None:
    seconds = iter([0.0, 100.0])
    last = iter([0.0, 100.0])
    deadline = TimeLimit(own=5, whole=1e-9, waited=lambda: next(seconds, 100.0)).begin(lambda: next(last, 100.0))
    assert deadline.left() <= 0
    with pytest.raises(WholeTimeLimitError, match=r"of which it waited 0\.0 s"):
        deadline.check()


def test_a_reader_never_sees_half_of_a_change() -> None:
    """A request ends while another thread reads: at each step of the change, it finds the time since the request began."""
    least = 0.05
    found: list[tuple[float, float]] = []
    ending = False

    class Observed(WaitingTime):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if ending:
                found.append((self.seconds(), time.monotonic() - began))

    began = time.monotonic()
    waiting = Observed()
    waiting.begin()
    time.sleep(least)
    ending = True
    waiting.end(failed=False)
    assert found
    assert all(least <= seconds <= passed for seconds, passed in found), found
