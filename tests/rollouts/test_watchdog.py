"""A rollout in which nobody makes progress is named with the line that its agent waits at, by every executor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from lightning_core.rollouts.attempt import Job
from lightning_core.rollouts.local_agents import patched
from lightning_core.rollouts.runner import Runner
from lightning_core.rollouts.watchdog import Watchdog
from tests.rollouts import faulty_places
from tests.rollouts.faulty_places import ROUTING, places, settings


@pytest.mark.parametrize(
    ("executor", "solve", "line"),
    [
        ("task", faulty_places.wait, "in _silence: await asyncio.sleep(NEVER)"),
        ("thread", faulty_places.wait, "in _silence: await asyncio.sleep(NEVER)"),
        ("process", faulty_places.wait, "in _silence: await asyncio.sleep(NEVER)"),
        ("thread", faulty_places.solve, "in _solve: time.sleep("),
        ("process", faulty_places.solve, "in _solve: time.sleep("),
    ],
)
def test_the_line_at_which_an_agent_hangs_is_logged(
    executor: str, solve: Callable[[Any], Any], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with patched(()), places() as (endpoint, provider):
        job = Job(task={"id": "1", "plan": {"agent": "hangs"}, "provider": provider}, task_id="1", seed=1)
        with Runner(solve, endpoint=endpoint, settings=settings(executor=executor, retries=0)) as runner:
            runner.submit([job], routing=ROUTING).result(60)
    (message,) = [text for record in caplog.records if "nobody has made progress" in (text := record.getMessage())]
    assert "rollouts.timeout_seconds" in message
    assert "faulty_places.py" in message
    assert line in message


class Unanswering:
    """An agent whose process does not say what it does."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    def slow_down(self) -> None: ...

    async def stacks(self) -> str:
        self.asked.set()
        return await asyncio.Event().wait() and ""


def test_a_rollout_that_ends_before_its_process_answers_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    async def watch() -> None:
        agent = Unanswering()
        watching = asyncio.ensure_future(
            Watchdog(0.1).watch("1", agent, lambda: (0, 60.0), began=time.monotonic() - 60)
        )
        await asyncio.wait_for(agent.asked.wait(), 60)
        watching.cancel()
        await asyncio.wait({watching})

    asyncio.run(watch())
    (message,) = [record.getMessage() for record in caplog.records]
    assert "task '1': nobody has made progress" in message
    assert "the rollout ended before its process answered" in message
