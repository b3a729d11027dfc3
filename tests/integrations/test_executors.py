"""Agents of frameworks have the same names, tools and places in worker processes as in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.rollouts.attempt import Rollout
from lightning_core.rollouts.local_agents import patched
from tests.endpoint.serving import serve
from tests.integrations import executor_programs as programs
from tests.rollouts.executor_runs import numbered, run

ROUTING = Routing(trained=frozenset({"plan", "write"}))


@pytest.fixture
def endpoint() -> Iterator[PolicyEndpoint]:
    with patched(), serve(lambda prompt: "answer") as endpoint:
        yield endpoint


def shape(rollout: Rollout) -> Any:
    names = {event.id: event.name for event in rollout.trace.events}
    return (
        (rollout.status, rollout.error),
        [(event.kind, event.name, event.agent, names.get(event.parent or "")) for event in rollout.trace.events],
        [(call.agent, call.trained, names.get(call.parent or "")) for call in rollout.trace.calls],
    )


@pytest.mark.parametrize(
    "solve",
    [
        programs.with_langgraph,
        programs.with_openai_agents,
        pytest.param(programs.with_autogen, marks=pytest.mark.long),
        pytest.param(programs.with_autogen_core, marks=pytest.mark.long),
        programs.with_host_spans,
    ],
)
def test_a_worker_process_records_what_this_process_does(endpoint: PolicyEndpoint, solve: Callable[[Any], Any]) -> None:
    options = {"concurrency": 2, "timeout_seconds": 100, "agents": ROUTING.trained, "routing": ROUTING}
    here, there = (
        [shape(r) for r in run(endpoint, solve, numbered(3), executor=executor, **options)]
        for executor in ("task", "process")
    )
    assert here == there
    for (status, _), _, calls in here:
        assert status == "ok"
        assert [(agent, trained) for agent, trained, _ in calls] == [("plan", True), ("write", True)]
