"""Runs the programs beside one instrumentation and prints what was recorded: ``python -m tests.coexistence.case thread process``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from lightning_core.endpoint.server import Routing
from lightning_core.rollouts.attempt import Rollout
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing import tool_call
from tests.coexistence.programs import PROGRAMS, solve
from tests.endpoint.serving import serve
from tests.rollouts.executor_runs import run

ROUTING = Routing(trained=frozenset({"plan", "write"}))


def answer(prompt: str) -> str:
    """The tool call that the system prompt demands, then an answer."""
    system, _, rest = prompt.rpartition("CALL ")[2].partition("<|im_end|>")
    name, _, arguments = system.partition("\n")[0].partition(" ")
    if "CALL " not in prompt or f'"name": "{name}"' in rest:
        return "answer"
    return tool_call(name, **json.loads(arguments))


def shape(rollout: Rollout) -> Any:
    """What must not depend on the instrumentation."""
    names = {event.id: event.name for event in rollout.trace.events}
    # Exporters connect to their server, and some start a program.
    events = [event for event in rollout.trace.events if event.kind != "elsewhere"]
    return {
        "status": [rollout.status, rollout.error],
        "reward": rollout.trace.reward,
        "calls": [[call.agent, call.trained, names.get(call.parent or "")] for call in rollout.trace.calls],
        "events": [[e.kind, e.name, e.agent, names.get(e.parent or "")] for e in events],
    }


def main(executors: Sequence[str]) -> None:
    options: dict[str, Any] = {"concurrency": 2, "timeout_seconds": 110, "agents": ROUTING.trained, "routing": ROUTING}
    tasks = [{"id": f"{name} {n}", "program": name} for name in PROGRAMS for n in range(2)]
    with patched(), serve(answer) as endpoint:
        shapes = {
            f"{task['id']} in a {executor}": shape(rollout)
            for executor in executors
            for task, rollout in zip(tasks, run(endpoint, solve, tasks, executor=executor, **options), strict=True)
        }
    sys.stdout.write(json.dumps(shapes))


if __name__ == "__main__":
    main(sys.argv[1:])
