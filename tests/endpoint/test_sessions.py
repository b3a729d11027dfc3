"""Live rollouts, opened and forgotten by other threads than the endpoint's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator

import pytest

from lightning_core.capture.address import Address
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.sessions import Session, Sessions
from lightning_core.endpoint.transport.limits import Limits


@pytest.fixture
def eager_threads() -> Generator[None]:
    """Threads that take turns so often that they meet."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def session(rollout: int) -> Session:
    return Session(root=Address(rollout=f"{rollout:032x}", span="0" * 16), routing=Routing(), seed=None)


@pytest.mark.usefixtures("eager_threads")
def test_a_rollout_is_found_while_other_threads_open_and_forget_some() -> None:
    sessions = Sessions(Limits())
    for number in range(200):
        sessions.open(f"key-{number}", session(number))
    more, done = session(1000), threading.Event()

    def churn() -> None:
        while not done.is_set():
            sessions.open("more", more)
            sessions.forget("more")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(300):
            assert sessions.of_rollout("unknown") is None
            found = sessions.of_rollout(f"{199:032x}")
            assert found is not None
    finally:
        done.set()
        thread.join()
