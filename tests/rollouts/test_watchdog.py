"""A rollout in which nobody makes progress is named with the line that its agent waits at, by every executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_core.rollouts.attempt import Job
from lightning_core.rollouts.local_agents import patched
from lightning_core.rollouts.runner import Runner
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
