"""Counts how rollouts with a fault at each place end, for each executor and concurrency.

    python -m tests.bench.blame [--executors task thread process fresh] [--concurrency 1 64 1000] [--places upstream …]

The agent and its faults are those of `tests.rollouts.faulty_places`. In a run at one concurrency, rollouts with all faults run beside each
other, and as many without. Each run is a process of its own. A cell shows the rollouts that

- counted, with the reward of the same agent without the fault,
- were repeated,
- were left out,
- wrongly 0: counted with another reward. The target is 0 in every cell.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

from lightning_core.rollouts.attempt import Attempt, Job
from lightning_core.rollouts.local_agents import patched
from lightning_core.rollouts.runner import Runner
from tests.bench.cells import EXECUTORS, end_cell, run_cell
from tests.rollouts import faulty_places
from tests.rollouts.faulty_places import PLACES, ROUTING, ideal, places, settings

RUN_SECONDS = 1200


def cells(executor: str, chosen: Sequence[str]) -> list[tuple[str, str]]:
    """The places and faults of a run. A killed worker needs a process."""
    in_process = executor in ("task", "thread")
    return [(place, fault) for place in chosen for fault in PLACES[place] if not (in_process and place == "worker")]


def measure(executor: str, concurrency: int, chosen: Sequence[str]) -> dict[str, Counter[str]]:
    """One run, in this process: the counts of each cell."""
    faults = cells(executor, chosen)
    each = max(2, concurrency // (2 * len(faults)))
    plans: list[tuple[str, dict[str, str]]] = [
        (f"{place}: {fault}", {place: fault}) for _ in range(each) for place, fault in faults
    ]
    plans += [("without a fault", {})] * len(plans)
    solve = faulty_places.solve_async if executor == "task" else faulty_places.solve
    counts: dict[str, Counter[str]] = {name: Counter() for name, _ in plans}
    with patched(()), places() as (endpoint, provider):
        jobs = [
            Job(task={"id": str(n), "plan": plan, "provider": provider}, task_id=str(n), seed=n)
            for n, (_, plan) in enumerate(plans)
        ]
        # One at a time, rollouts without a fault must run after and before those with one.
        Random(0).shuffle(jobs)

        def on_attempt(attempt: Attempt) -> None:
            name, plan = plans[int(attempt.rollout.job.task_id)]
            found = counts[name]
            found["repeated"] += not attempt.final
            if attempt.final and attempt.rollout.status in _COUNTING:
                right = attempt.rollout.reward == ideal(plan)
                found["counted" if right else "wrong"] += 1
                if not right:
                    print(f"wrong: {name}: {attempt.rollout.status}: {attempt.rollout.error}", file=sys.stderr)
            elif attempt.final:
                found["left out"] += 1
                found[attempt.rollout.status] += 1

        options = {**EXECUTORS[executor], "concurrency": concurrency, "retries": 1}
        rollouts = settings(**options)
        with Runner(solve, endpoint=endpoint, settings=rollouts, reward_function=faulty_places.score) as runner:
            runner.submit(jobs, routing=ROUTING, on_attempt=on_attempt).result()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executors", nargs="*", default=list(EXECUTORS), choices=list(EXECUTORS))
    parser.add_argument("--concurrency", nargs="*", type=int, default=[1, 64, 1000])
    parser.add_argument("--places", nargs="*", default=list(PLACES), choices=list(PLACES))
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        executor, concurrency, *chosen = arguments.run
        end_cell(measure(executor, int(concurrency), chosen))
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'fault':38}{'executor':10}{'at once':>8}{'counted':>9}{'repeated':>10}{'left out':>10}{'wrongly 0':>11}  statuses"
    )
    total: Counter[str] = Counter()
    for executor in arguments.executors:
        for concurrency in arguments.concurrency:
            began = time.monotonic()
            cell = [executor, str(concurrency), *arguments.places]
            counts = run_cell("tests.bench.blame", "--run", cell, seconds=RUN_SECONDS)
            if counts is None:
                total["lost"] += 1
                print(f"{'(did not survive)':38}{executor:10}{concurrency:8}", flush=True)
                continue
            for name, found in counts.items():
                total["cells"] += 1
                total["wrong"] += bool(found.get("wrong"))
                statuses = ", ".join(f"{key} {number}" for key, number in found.items() if key not in _COLUMNS)
                numbers = [found.get(key, 0) for key in _COLUMNS]
                print(
                    f"{name:38}{executor:10}{concurrency:8}{numbers[0]:9}{numbers[1]:10}{numbers[2]:10}{numbers[3]:11}  {statuses}",
                    flush=True,
                )
            print(f"({executor}, {concurrency} at once: {time.monotonic() - began:.0f} s)", flush=True)
    print(f"{total['cells']} cells, {total['wrong']} with a wrong reward, {total['lost']} runs lost")


_COUNTING = ("ok", "failed", "max_calls")
"""The statuses that count with a reward; see `lightning_core.rollouts.outcome`."""
_COLUMNS = ("counted", "repeated", "left out", "wrong")


if __name__ == "__main__":
    main()
