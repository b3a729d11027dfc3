"""How often a repeated cause is logged."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from lightning_core.errors import Repeats


def test_a_repeated_cause_is_logged_at_powers_of_ten() -> None:
    repeats = Repeats()
    logged = [text for _ in range(250) if (text := repeats.count("a")) is not None]
    assert logged == ["", " (10 times so far)", " (100 times so far)"]
    assert repeats.count("b") == ""


def test_a_cause_that_occurs_several_times_at_once_is_logged_when_it_passes_a_power_of_ten() -> None:
    repeats = Repeats()
    assert [repeats.count("a", times) for times in (7, 2, 30, 60, 900)] == [
        " (7 times so far)",
        None,
        " (39 times so far)",
        None,
        " (999 times so far)",
    ]


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_lose_no_count() -> None:
    repeats = Repeats()

    def count() -> None:
        for _ in range(25_000):
            repeats.count("a")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert repeats.count("a", 900_000) == " (1000000 times so far)"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_is_forked_while_another_thread_counts_can_count() -> None:
    class Slow:
        """A cause whose hash is computed, while the lock is held, until the test lets it go."""

        def __hash__(self) -> int:
            held.set()
            release.wait(60)
            return 0

    repeats, held, release = Repeats(), threading.Event(), threading.Event()
    repeats.count("a")
    other = threading.Thread(target=repeats.count, args=(Slow(),))
    other.start()
    assert held.wait(60)
    if (child := os.fork()) == 0:
        signal.alarm(30)  # ends a child that hangs
        os._exit(0 if repeats.count("a") == "" else 1)
    status = os.waitpid(child, 0)[1]
    release.set()
    other.join()
    assert os.waitstatus_to_exitcode(status) == 0
