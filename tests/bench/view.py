"""Times of the viewer's pages of rollouts: a store of 10^5 rollouts, and one rollout of many calls.

    python -m tests.bench.view [--rollouts 100000] [--characters 2000] [--calls 300]

Each page is requested over HTTP as by a browser, the first time and again. The first time is the one that counts: the store is opened
for each request, and only the system has its pages in memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from lightning_core import trace as tr
from lightning_core.records.store import Store
from tests.tools.view.made_runs import make_big_store, make_run, rollout
from tests.tools.view.pages import browsing
from tests.tools.view.recorded_run import AGENT, CREDIT, assign, record, root, span, trainable

PER_STEP = 100
PAGES = (
    "rollouts",
    "rollouts?page=1000",
    "rollouts?sort=reward&direction=down",
    "rollouts?sort=seconds&page=20",
    "rollouts?phase=train&step=500&min=0.5",
    "rollouts?agent=talker",
    "rollouts?agent=nobody",
    "rollouts?text=hello",
    "rollouts?text=not+there",
    "rollouts/{middle}",
    "tasks",
    "tasks?sort=gain&direction=down",
    "task?id=task-7",
)
CREDITED = ("rollouts/1", "credit", "credit?step=0&rewards=explicit&advantage=rloo")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--characters", type=int, default=2000, help="length of each prompt and response")
    parser.add_argument("--calls", type=int, default=300, help="calls of the long rollout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = {"run": {"name": "big"}}
        make_run(folder / "big", config=config)
        text = ("hello " * options.characters)[: options.characters]
        make_big_store(folder / "big" / "store.db", steps=options.rollouts // PER_STEP, per_step=PER_STEP, text=text)
        make_run(folder / "long", config=config, rollouts=[long_rollout(options.calls), rollout(2)])
        make_credited(folder / "credited")
        size = (folder / "big" / "store.db").stat().st_size / 1e6
        print(f"{options.rollouts:,} rollouts, {size:,.0f} MB; a rollout of {options.calls} calls\n")
        print(f"{'page':64}{'first':>9}{'again':>9}{'kB':>8}")
        with browsing(folder) as client:
            client.timeout = httpx.Timeout(600)
            for page in PAGES:
                show(client, f"/runs/big/{page.format(middle=options.rollouts // 2)}")
            for page in CREDITED:
                show(client, f"/runs/credited/{page}")
            show(client, "/runs/long/rollouts/1")
            show(client, f"/runs/long/rollouts/1/calls/{options.calls:016x}")


def make_credited(folder: Path, *, tasks: int = 16, attempts: int = 8, calls: int = 5) -> None:
    """Write a run with one step that has credit."""
    config = {
        "policy": {"model": "any"},
        "agents": {"train": [AGENT]},
        "credit": dict(CREDIT),
        "run": {"name": "credited"},
    }
    make_run(folder, config=config, rollouts=[])
    with Store(folder / "store.db") as store:
        for number in range(tasks * attempts):
            identity, task = f"{number + 1:032x}", f"task {number // attempts}"
            earned = {tr.OPERATION: "reward", tr.REWARD_VALUE: float(number % 3)}
            spans = [root(identity, task=task), span(identity, (number + 1) << 16, 0, earned)]
            for index in range(1, calls + 1):
                spans.append(span(identity, ((number + 1) << 16) + index, 0, trainable(index, tokens=300)))
            store.add_rollout(record(number + 1, identity, task_id=task, reward=float(number % 3)), spans)
        assign(store, 0, CREDIT)


def show(client: httpx.Client, path: str) -> None:
    """Print the time of a page, twice, and its size."""
    times: list[float] = []
    size = 0
    for _ in range(2):
        start = time.perf_counter()
        size = len(client.get(path).raise_for_status().content)
        times.append(time.perf_counter() - start)
    print(f"{path:64}{times[0]:8.2f}s{times[1]:8.2f}s{size / 1000:8.0f}", flush=True)


def long_rollout(calls: int) -> Any:
    """A rollout of one agent whose every call has the whole conversation so far."""
    identity = "1" * 32
    messages: list[dict[str, str]] = [{"role": "system", "content": "Solve the task. " * 50}]
    spans = [root(identity)]
    for number in range(1, calls + 1):
        messages.append({"role": "user", "content": f"observation {number}: {'some output of a tool ' * 30}"})
        answer = {"role": "assistant", "content": f"thought {number}, then an action " * 10}
        attributes = {
            tr.OPERATION: "chat",
            tr.AGENT: "worker",
            tr.SEQUENCE: number,
            tr.INPUT_MESSAGES: json.dumps(messages),
            tr.OUTPUT_MESSAGES: json.dumps([answer]),
            tr.CONTEXT: "clean",
        }
        spans.append(span(identity, number, 0, attributes))
        messages.append(answer)
    return record(1, identity), spans


if __name__ == "__main__":
    main()
