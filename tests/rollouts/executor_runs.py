"""Runs of agents by each executor, with real processes and a real endpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_core.config.sections import Rollouts
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.rollouts.executors.choose import choose_executor
from lightning_core.rollouts.local_agents import patched
from lightning_core.rollouts.runner import Runner
from tests.endpoint.serving import serve

ROUTING = Routing(trained=frozenset({"a"}), frozen=dict.fromkeys(("planner", "writer"), "base"))

WORKERS = MappingProxyType({"executor": "process", "retries": 0, "concurrency": 4, "timeout_seconds": 60})


def open_endpoint() -> Iterator[PolicyEndpoint]:
    """An endpoint whose model always says "answer", for a fixture."""
    with patched(()), serve(lambda prompt: "answer") as endpoint:
        yield endpoint


@contextlib.contextmanager
def running(
    endpoint: PolicyEndpoint, solve: Callable[[Any], Any], *, settings: Mapping[str, Any] = WORKERS, **options: Any
) -> Generator[Runner]:
    """A runner with ``settings``, which ``options`` replace; by default of four worker processes, without retries."""
    more = {name: options.pop(name) for name in ("reward_function", "agents", "strict") if name in options}
    agent_name = options.pop("agent_name", None)
    rollouts = Rollouts.model_validate({**settings, **options})
    executor = choose_executor(solve, more.get("reward_function"), rollouts, agent_name=agent_name)
    with Runner(solve, endpoint=endpoint, settings=rollouts, executor=executor, **more) as runner:
        yield runner


def finish(runner: Runner, tasks: list[dict[str, Any]], *, routing: Routing = ROUTING, **options: Any) -> list[Rollout]:
    """The rollouts of ``tasks``; they are cancelled if a test waits too long."""
    jobs = [Job(task=task, task_id=str(task["id"]), seed=n + 1) for n, task in enumerate(tasks)]
    work = runner.submit(jobs, routing=routing, **options)
    try:
        return work.result(120)
    finally:
        work.cancel()


def run(
    endpoint: PolicyEndpoint, solve: Callable[[Any], Any], tasks: list[dict[str, Any]], **options: Any
) -> list[Rollout]:
    """The rollouts of ``tasks``, in a runner of their own."""
    submitted = {name: options.pop(name) for name in ("on_attempt", "routing") if name in options}
    with running(endpoint, solve, **options) as runner:
        return finish(runner, tasks, **submitted)


def numbered(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Tasks with the ids 0, 1, …."""
    return [{"id": str(n), **fields} for n in range(count)]


def exists(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not yet reaped does not."""
    with contextlib.suppress(OSError):
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    return False


def wait_until_gone(pids: list[int]) -> None:
    """Fail if any of the processes still runs after 20 s."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(map(exists, pids)):
        time.sleep(0.05)
    assert [pid for pid in pids if exists(pid)] == []
