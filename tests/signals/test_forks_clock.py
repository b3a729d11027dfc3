"""Forks whose agents read the clock: it starts where that of their rollout did, and spans keep the real time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_core.capture import rollout, scope
from lightning_core.capture.clock import clock_from, now_ns, require_clock, to_real_ns
from lightning_core.config.sections import Rollouts
from lightning_core.errors import ConfigError, MissingExtra
from lightning_core.rollouts.attempt import Job
from lightning_core.rollouts.executors.choose import choose_executor
from lightning_core.rollouts.jobs import fork_job
from lightning_core.signals.forks.points import agent_start, fork_points
from lightning_core.trace import AGENT_START
from tests.signals import forked_agents as agents
from tests.signals.test_forks import AGENTS, TASK, run, running

HOUR_NS = 3600 * 10**9


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "time_machine", None)
    with pytest.raises(MissingExtra, match=r"pip install 'lightning-rl\[clock\]'"):
        require_clock()


def test_a_clock_needs_a_process_for_each_rollout(tmp_path: Path) -> None:
    pytest.importorskip("time_machine")
    settings = Rollouts.model_validate({"forks": {"clock": "recorded"}})

    def local(task: Any) -> float:
        return 0.0

    with pytest.raises(ConfigError, match="agent"):
        choose_executor(local, None, settings)


def test_the_clock_ticks_from_its_start_and_spans_keep_the_real_time() -> None:
    pytest.importorskip("time_machine")
    before = time.time_ns()
    with rollout({}) as opened, clock_from(before - HOUR_NS):
        seen = time.time_ns()
        assert 0 <= seen - (before - HOUR_NS) < HOUR_NS // 2
        assert before <= now_ns() < before + HOUR_NS // 2
        assert abs(to_real_ns(seen) - now_ns()) < HOUR_NS // 2
        began = time.monotonic()
        with scope("node", kind="node"):
            assert not threading.Event().wait(0.02)
        assert time.monotonic() - began >= 0.02
        assert time.time_ns() > seen
    node = next(event for event in opened.trace.events if event.kind == "node")
    assert before <= node.start_ns < node.end_ns <= time.time_ns()
    assert to_real_ns(5) == 5
    assert abs(time.time_ns() - now_ns()) < HOUR_NS // 2


def test_a_fork_starts_at_the_recorded_time() -> None:
    pytest.importorskip("time_machine")
    with running(agents.dated, executor="process", concurrency=1) as runner:
        origin = run(runner, Job(task=TASK, task_id="t0", seed=7))
        assert (
            agent_start(origin.trace)
            == origin.trace.events[0].attributes[AGENT_START]
            >= origin.trace.events[0].start_ns
        )
        # In the middle of a second, so that neither rollout passes the end of one between its readings.
        while not (origin.trace.events[0].attributes[AGENT_START] % 10**9) < 700_000_000:
            origin = run(runner, Job(task=TASK, task_id="t0", seed=7))
        time.sleep(1)
        for point in fork_points(origin.trace, AGENTS):
            live = run(runner, fork_job(origin, point, 0, 0))
            assert live.dropped is not None
            began = time.time_ns()
            found = run(runner, fork_job(origin, point, 0, 0, clock="recorded"))
            assert found.dropped is None
            (tool,) = (event for event in found.trace.events if event.kind == "tool")
            assert began <= tool.start_ns <= tool.end_ns <= time.time_ns()
