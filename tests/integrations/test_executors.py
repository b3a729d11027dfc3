"""Agents of frameworks have the same names, tools and places in worker processes as in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.config.sections import Rollouts
from lightning_core.endpoint.routing import Routing
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.rollouts.local_agents import patched
from lightning_core.rollouts.runner import Runner
from tests.integrations import executor_programs as programs

ROUTING = Routing(trained=frozenset({"plan", "write"}))


@pytest.fixture
def endpoint() -> Iterator[PolicyEndpoint]:
    backend = ScriptedBackend(lambda prompt: "answer")
    with patched(), PolicyEndpoint(backend, Chat(backend.tokenizer)) as endpoint:
        yield endpoint


def run(endpoint: PolicyEndpoint, solve: Callable[[Any], Any], executor: str) -> list[Rollout]:
    settings = Rollouts.model_validate({"executor": executor, "retries": 0, "concurrency": 2, "timeout_seconds": 120})
    with Runner(solve, endpoint=endpoint, settings=settings, agents=ROUTING.trained) as runner:
        jobs = [Job(task={"id": str(n)}, task_id=str(n), seed=n) for n in range(3)]
        return runner.submit(jobs, routing=ROUTING).result(200)


def shape(rollout: Rollout) -> Any:
    names = {event.id: event.name for event in rollout.trace.events}
    return (
        (rollout.status, rollout.error),
        [(event.kind, event.name, event.agent, names.get(event.parent or "")) for event in rollout.trace.events],
        [(call.agent, call.trained, names.get(call.parent or "")) for call in rollout.trace.calls],
    )


@pytest.mark.parametrize(
    "solve",
    [programs.with_langgraph, programs.with_openai_agents, programs.with_autogen, programs.with_host_spans],
)
def test_a_worker_process_records_what_this_process_does(endpoint: PolicyEndpoint, solve: Callable[[Any], Any]) -> None:
    here, there = ([shape(r) for r in run(endpoint, solve, executor)] for executor in ("task", "process"))
    assert here == there
    for (status, _), _, calls in here:
        assert status == "ok"
        assert [(agent, trained) for agent, trained, _ in calls] == [("plan", True), ("write", True)]
