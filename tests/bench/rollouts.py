"""Measures rollouts per second of the collector for an agent that does nothing, with and without the store.

    python -m tests.bench.rollouts [--rollouts 2000] [--concurrency 64] [--rounds 3]

The endpoint, the runner, capture and the collector are real; without the store, records are dropped. Also prints the time of
``--agents`` async agents whose only tool sleeps 0.1 s in `asyncio.to_thread`. Best of alternating rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from lightning_core import Config, load_config
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.records.store import Store
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.local_agents import capturing, open_agents

GROUP = 8
TOOL_SECONDS = 0.1


class NoStore:
    """A store that drops all records."""

    def add_rollouts(self, rollouts: Iterable[Any]) -> None:
        del rollouts

    def queue_rollouts(self, rollouts: Iterable[Any]) -> Future[None]:
        del rollouts
        done: Future[None] = Future()
        done.set_result(None)
        return done


async def nothing(task: Any) -> float:
    """An agent that makes no call and earns 1."""
    return 1.0


async def tool(task: Any) -> float:
    """An agent with one blocking tool."""
    await asyncio.to_thread(time.sleep, TOOL_SECONDS)
    return 1.0


def measure(config: Config, solve: Callable[[Any], Any], rollouts: int, *, stored: bool) -> float:
    """Seconds for ``rollouts`` rollouts in groups of `GROUP`."""
    backend = ScriptedBackend(lambda prompt: "hello")
    tasks = [{"id": str(index)} for index in range(-(-rollouts // GROUP))]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".")))
        stack.enter_context(capturing(config))
        store = stack.enter_context(Store(folder / "store.db")) if stored else cast(Store, NoStore())
        agents = stack.enter_context(open_agents(config, solve, backend, {"policy": Chat(backend.tokenizer)}))
        collector = Collector(config, agents, store)

        async def run() -> None:
            await asyncio.gather(*(collector.roll_out(task, "train", 0) for task in tasks))

        began = time.perf_counter()
        asyncio.run(run())
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    def config(concurrency: int) -> Config:
        rollouts = {"concurrency": concurrency, "group_size": GROUP}
        return load_config({"agent": "tests.bench.rollouts:nothing", "policy": {"model": "m"}, "rollouts": rollouts})

    plain = stored = tools = float("inf")
    for _ in range(arguments.rounds):
        plain = min(plain, measure(config(arguments.concurrency), nothing, arguments.rollouts, stored=False))
        stored = min(stored, measure(config(arguments.concurrency), nothing, arguments.rollouts, stored=True))
        tools = min(tools, measure(config(arguments.agents), tool, arguments.agents, stored=True))
    print(f"{arguments.rollouts} rollouts, {arguments.concurrency} at a time, best of {arguments.rounds};")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"  without the store  {arguments.rollouts / plain:6.0f} rollouts/s")
    print(f"  with the store     {arguments.rollouts / stored:6.0f} rollouts/s   {plain / stored:.2f} of that")
    print(f"  {arguments.agents} agents with a {TOOL_SECONDS} s tool at the same time: {tools:.2f} s")


if __name__ == "__main__":
    main()
