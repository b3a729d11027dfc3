"""Measures the collector's rollouts per second, and its CPU time per rollout, for an agent that does nothing.

    python -m tests.bench.rollouts [--rollouts 2000] [--concurrency 64] [--rounds 3]
    python -m tests.bench.rollouts --memory 100000

The endpoint, the runner, capture and the collector are real; without the store, records are dropped. CPU is user and system time of this
process and of all workers, after as many rollouts as run at a time. Also prints the time of ``--agents`` async agents whose only tool
sleeps 0.1 s in `asyncio.to_thread`. Best of alternating rounds. ``--memory``: prints the memory of this process while that many rollouts
run, and the size of the store.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from lightning_core import Config, load_config
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.records.store import Store
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.executors.groups import descendants
from lightning_core.rollouts.local_agents import capturing, open_agents
from tests.bench.null_agents import TOOL_SECONDS, nothing, tool
from tests.bench.processes import cpu_seconds, resident_bytes

GROUP = 8
LOOKS = 10

Executor = Literal["task", "process"]


class NoStore:
    """A store that drops all records."""

    def add_rollouts(self, rollouts: Iterable[Any]) -> None:
        del rollouts

    def queue_rollouts(self, rollouts: Iterable[Any]) -> Future[None]:
        del rollouts
        done: Future[None] = Future()
        done.set_result(None)
        return done


class Cost(NamedTuple):
    """Seconds of the clock, and of processors."""

    wall: float
    cpu: float


def settings(executor: Executor, concurrency: int) -> Config:
    rollouts = {"concurrency": concurrency, "group_size": GROUP, "executor": executor}
    return load_config({"agent": "tests.bench.null_agents:nothing", "policy": {"model": "m"}, "rollouts": rollouts})


@asynccontextmanager
async def collecting(
    config: Config, solve: Callable[[Any], Any], file: Path | None
) -> AsyncGenerator[Callable[[int], Any]]:
    """A function that runs a number of rollouts in groups of `GROUP`. ``file``: of the store, if there is one."""
    backend = ScriptedBackend(lambda prompt: "hello")
    with ExitStack() as stack:
        stack.enter_context(capturing(config))
        store = cast(Store, NoStore()) if file is None else stack.enter_context(Store(file))
        agents = stack.enter_context(open_agents(config, solve, backend, {"policy": Chat(backend.tokenizer)}))
        collector = Collector(config, agents, store)

        async def run(rollouts: int) -> None:
            tasks = [{"id": str(index)} for index in range(-(-rollouts // GROUP))]
            await asyncio.gather(*(collector.roll_out(task, "train", 0) for task in tasks))

        yield run


def processor_seconds() -> float:
    """CPU time of this process and of the workers that run."""
    return time.process_time() + sum(cpu_seconds(pid) for pid in descendants())


async def measure(config: Config, solve: Callable[[Any], Any], rollouts: int, *, stored: bool) -> Cost:
    """The cost of ``rollouts`` rollouts, after as many as run at a time."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        async with collecting(config, solve, Path(folder) / "store.db" if stored else None) as run:
            await run(config.rollouts.concurrency)
            cpu, began = processor_seconds(), time.perf_counter()
            await run(rollouts)
            return Cost(time.perf_counter() - began, processor_seconds() - cpu)


async def watch_memory(concurrency: int, rollouts: int) -> None:
    """Print the memory of this process at `LOOKS` times, and the size of the store."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        file = Path(folder) / "store.db"
        async with collecting(settings("task", concurrency), nothing, file) as run:
            for done in range(0, rollouts, -(-rollouts // LOOKS)):
                await run(-(-rollouts // LOOKS))
                gc.collect()
                memory = resident_bytes(os.getpid()) / 2**20
                print(f"  after {done + -(-rollouts // LOOKS):7d} rollouts {memory:7.1f} MiB", flush=True)
        print(f"  the store: {file.stat().st_size / rollouts / 1024:.2f} KiB per rollout")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, metavar="ROLLOUTS")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {arguments.concurrency} rollouts at a time")
    if arguments.memory is not None:
        asyncio.run(watch_memory(arguments.concurrency, arguments.memory))
        return
    cases: dict[str, tuple[Executor, bool]] = {
        "in this process, without the store": ("task", False),
        "in this process, with the store": ("task", True),
        "in workers, with the store": ("process", True),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in cases}
    tools = float("inf")
    for _ in range(arguments.rounds):
        for name, (executor, stored) in cases.items():
            config = settings(executor, arguments.concurrency)
            costs[name].append(asyncio.run(measure(config, nothing, arguments.rollouts, stored=stored)))
        many = settings("task", arguments.agents)
        tools = min(tools, asyncio.run(measure(many, tool, arguments.agents, stored=True)).wall)
    print(f"{arguments.rollouts} rollouts, best of {arguments.rounds}")
    for name, found in costs.items():
        rate = arguments.rollouts / min(cost.wall for cost in found)
        cpu = min(cost.cpu for cost in found) / arguments.rollouts
        print(f"  {name:36s}{rate:6.0f} rollouts/s{cpu * 1000:8.2f} ms of CPU per rollout")
    print(f"  {arguments.agents} agents with a {TOOL_SECONDS} s tool at the same time: {tools:.2f} s")


if __name__ == "__main__":
    main()
