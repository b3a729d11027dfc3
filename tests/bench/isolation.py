"""Measures what a fault of one rollout does to the others, for each executor.

    python -m tests.bench.isolation [--executors task thread process fresh] [--faults spin …] [--rollouts 60] [--calls 4] [--seconds 0.1]

Every fifth rollout of `tests.rollouts.faulty_agents` has the fault; the others are healthy. The endpoint is real; its scripted model
takes ``--seconds`` for a response, and a rollout has ``--calls``. Each cell runs in a process of its own: the rollouts without
faults, then with them.

- survived: the run ended by itself.
- throughput: the time until all healthy rollouts have ended without faults, divided by that with faults.
- lost: healthy rollouts without a result.
- blamed: healthy rollouts that failed or used a retry; faulty ones with another status than their fault's.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import Any

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.config.sections import Rollouts
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.rollouts.attempt import Attempt, Job, Rollout
from lightning_core.rollouts.local_agents import patched
from lightning_core.rollouts.runner import Runner
from tests.bench.cells import EXECUTORS, end_cell, run_cell
from tests.rollouts import faulty_agents
from tests.rollouts.faulty_agents import ASYNC_FAULTS, FAULTS, expected_status

LIMIT = 3.0
CONCURRENCY = 8
CELL_SECONDS = 180


def measure(executor: str, kind: str, fault: str, rollouts: int, calls: int, delay: float) -> dict[str, Any]:
    """One cell, in this process. ``kind``: ``sync`` or ``async``."""
    solve = faulty_agents.solve if kind == "sync" else faulty_agents.solve_async
    faulty = {str(n) for n in range(rollouts) if n % 5 == 2}
    expected = expected_status(fault)
    settings = Rollouts(concurrency=CONCURRENCY, timeout_seconds=LIMIT, **EXECUTORS[executor])
    backend = ScriptedBackend(lambda prompt: "answer", delay=delay)
    reward = faulty_agents.score if fault == "hang reward" else None
    with (
        patched(()),
        PolicyEndpoint(backend, Chat(backend.tokenizer)) as endpoint,
        Runner(solve, endpoint=endpoint, settings=settings, reward_function=reward) as runner,
    ):

        def run(fault: str) -> tuple[float, list[Rollout]]:
            """The seconds until the last healthy rollout has ended, and all rollouts."""
            tasks = [
                {"id": str(n), "calls": calls, "fault": fault if str(n) in faulty else ""} for n in range(rollouts)
            ]
            jobs = [Job(task=task, task_id=task["id"], seed=n + 1) for n, task in enumerate(tasks)]
            random.Random(0).shuffle(jobs)
            last = began = time.monotonic()

            def on_attempt(attempt: Attempt) -> None:
                nonlocal last
                if attempt.rollout.job.task_id not in faulty:
                    last = time.monotonic()

            found = runner.submit(jobs, routing=ROUTING, on_attempt=on_attempt).result()
            return last - began, found

        run("")  # the first rollouts wait for the agent to be imported
        without, _ = run("")
        seconds, found = run(fault)
    lost = blamed = 0
    for rollout in found:
        if rollout.job.task_id in faulty:
            blamed += rollout.status != expected
        else:
            lost += rollout.status != "ok"
            blamed += rollout.attempt > 0 or rollout.status == "failed" or rollout.reward != 1.0
    return {"throughput": without / seconds, "lost": lost, "blamed": blamed}


ROUTING = Routing(trained=frozenset({"a"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executors", nargs="*", default=list(EXECUTORS), choices=list(EXECUTORS))
    parser.add_argument("--faults", nargs="*")
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--calls", type=int, default=faulty_agents.CALLS)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--cell", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        executor, kind, fault, rollouts, calls, seconds = arguments.cell
        end_cell(measure(executor, kind, fault, int(rollouts), int(calls), float(seconds)))
    print(f"{arguments.rollouts} rollouts, {CONCURRENCY} at a time, every fifth with a fault; time limit {LIMIT:g} s")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'fault':24}{'executor':10}{'survived':>10}{'throughput':>12}{'lost':>6}{'blamed':>8}")
    for kind, faults in (("sync", FAULTS), ("async", ASYNC_FAULTS)):
        for fault in faults:
            if arguments.faults and fault not in arguments.faults:
                continue
            for executor in arguments.executors:
                cell = [executor, kind, fault, str(arguments.rollouts), str(arguments.calls), str(arguments.seconds)]
                found = run_cell("tests.bench.isolation", "--cell", cell, seconds=CELL_SECONDS, quiet=True)
                name = f"{fault} ({kind})"
                if found is None:
                    print(f"{name:24}{executor:10}{'no':>10}", flush=True)
                else:
                    counts = f"{found['throughput']:12.2f}{found['lost']:6}{found['blamed']:8}"
                    print(f"{name:24}{executor:10}{'yes':>10}{counts}", flush=True)


if __name__ == "__main__":
    main()
