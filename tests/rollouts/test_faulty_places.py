"""The reward of a rollout never depends on latency and errors outside its agent: they decide only whether it counts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.rollouts.local_agents import patched
from lightning_core.rollouts.runner import Runner
from tests.rollouts import faulty_places
from tests.rollouts.faulty_places import AGENTS_OWN, PLACES, ROUTING, ideal, places, settings


def random_plan(chosen: random.Random, *, in_process: bool) -> dict[str, str]:
    """A fault at no, one or some of the places."""
    possible = [place for place in PLACES if not (in_process and place == "worker")]
    return {place: chosen.choice(PLACES[place]) for place in chosen.sample(possible, chosen.choice((0, 1, 1, 2, 3)))}


def swallows(plan: dict[str, str], chosen: random.Random) -> bool:
    """Whether the agent catches every error and returns 0. One that bounds a call by its own clock and goes on is taken at its word."""
    mine = plan.get("agent") in AGENTS_OWN or plan.get("client") == "gives up" or "endpoint" in plan
    return not mine and plan.get("upstream") != "refuses" and chosen.random() < 0.5


def run(executor: str, tasks: list[dict[str, Any]]) -> list[Rollout]:
    solve = faulty_places.solve_async if executor == "task" else faulty_places.solve
    with patched(()), places() as (endpoint, provider):
        jobs = [Job(task={**task, "provider": provider}, task_id=task["id"], seed=1) for task in tasks]
        options = settings(executor=executor, concurrency=len(tasks), retries=0)
        with Runner(solve, endpoint=endpoint, settings=options, reward_function=faulty_places.score) as runner:
            return runner.submit(jobs, routing=ROUTING).result(120)


@pytest.mark.parametrize(
    ("executor", "seed"), [("task", 1), ("thread", 2), pytest.param("process", 3, marks=pytest.mark.long)]
)
def test_the_reward_depends_on_the_agent_alone(executor: str, seed: int) -> None:
    chosen = random.Random(seed)
    plans: list[dict[str, str]] = [{}, *(random_plan(chosen, in_process=executor != "process") for _ in range(23))]
    tasks = [{"id": str(n), "plan": plan, "swallow": swallows(plan, chosen)} for n, plan in enumerate(plans)]
    rollouts = run(executor, tasks)
    counted = [(task, r) for task, r in zip(tasks, rollouts, strict=True) if r.status in ("ok", "failed")]
    wrong = [(task, r.status, r.reward, r.error) for task, r in counted if r.reward != ideal(task["plan"])]
    assert wrong == []
    assert counted, [r.error for r in rollouts]


STATUSES = [
    ("sampler", "slow", "ok"),
    ("upstream", "slow", "ok"),
    ("upstream", "fails once", "ok"),
    ("sampler", "never answers", "timeout"),
    ("client", "times out", "infrastructure"),
    ("client", "gives up", "timeout"),
    ("client", "cancels", "timeout"),
    ("client", "another key", "unauthorized"),
    ("upstream", "error in the stream", "stream_error"),
    ("upstream", "error first in the stream", "stream_error"),
    ("upstream", "cut stream", "infrastructure"),
    ("upstream", "refuses", "refused"),
    ("endpoint", "refuses", "refused"),
    ("endpoint", "overflow", "overflow"),
    ("reward", "hangs", "infrastructure"),
]


@pytest.mark.parametrize(("place", "fault", "status"), STATUSES)
def test_each_fault_has_its_status(
    outcomes: dict[tuple[str, str], Rollout], place: str, fault: str, status: str
) -> None:
    rollout = outcomes[place, fault]
    assert rollout.status == status, rollout.error
    if status == "ok":
        assert rollout.reward == 1.0
    if status in ("refused", "unauthorized") and place != "upstream":
        assert any(call.refused for call in rollout.trace.calls), "the ledger names the reason"


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], Rollout]:
    """One rollout for each fault of `STATUSES`, in worker processes."""
    faults = [(place, fault) for place, fault, _ in STATUSES]
    tasks = [{"id": str(n), "plan": {place: fault}} for n, (place, fault) in enumerate(faults)]
    return dict(zip(faults, run("process", tasks), strict=True))
