"""The memory of a training run whose agent has six turns and 1,500 tokens a rollout, on a machine with less memory than this one.

``python -m tests.bench.memory --agent 6`` prints it for 6 GB. The run has the shipped defaults, but 16 rollouts a step, which are more
than fit together. It finds so many GB of memory. Nothing keeps it from using more, so the peak shows whether its plan holds. Linux only.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from openai import OpenAI

from lightning_core import fit, load_config, trainable
from lightning_core.rollouts.hardware import available_memory
from lightning_core.trainers.torch import machine

TASKS, TURNS, ANSWER = 2, 6, 50
QUESTION = 165
"""Words of a turn's question."""
WORDS = ("river", "stone", "cloud", "paper", "green", "seven", "table", "under", "light", "winter", "bread", "field")


@trainable("reader")
def read(task: Mapping[str, Any]) -> float:
    """Each turn has a text of its own. The reward is the share of words that differ, so the attempts of a group differ."""
    drawn, messages = random.Random(task["id"]), list[dict[str, str]]()
    with OpenAI(api_key="none") as client:
        for _ in range(TURNS):
            messages.append({"role": "user", "content": " ".join(drawn.choices(WORDS, k=QUESTION))})
            sent: Any = messages
            done = client.chat.completions.create(model="gpt-4o-mini", messages=sent, max_tokens=ANSWER)
            messages.append({"role": "assistant", "content": done.choices[0].message.content or ""})
    words = " ".join(message["content"] for message in messages if message["role"] == "assistant").split()
    return len(set(words)) / max(1, len(words))


def measure_agent(model: str, gigabytes: float) -> None:
    """Train for a step with ``gigabytes`` for this process, and print what it took as JSON."""
    most = int(gigabytes * 2**30)

    def left() -> int:
        return max(0, min(most - psutil.Process().memory_info().rss, available_memory()))

    # What plans ask, and what is asked before freed memory is returned to the system.
    machine.available_memory = machine.free_physical_memory = left
    with tempfile.TemporaryDirectory() as folder:
        given = {"policy": {"model": model}, "rollouts": {"tasks_per_step": TASKS}, "trainer": {"steps": 1}}
        config = load_config({**given, "run": {"dir": folder}})
        result = fit(read, config=config, tasks=[{"id": str(number)} for number in range(TASKS)], progress=True)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20
    print(json.dumps({"peak": peak, "wall": result.summary.wall_seconds, "metrics": result.metrics[-1]}))


def show_agent(run_case: Callable[..., Any], gigabytes: float) -> None:
    """Print the peak memory of the run, which ``run_case`` makes in a process of its own."""
    found = run_case("--inside")
    metrics = found["metrics"]
    print(
        f"{TURNS} turns, {metrics['rollouts']:.0f} rollouts, planned for {gigabytes:g} GiB: peak {found['peak']:.2f} GiB, "
        f"{metrics['tokens_trained']:,.0f} tokens trained, {found['wall']:.0f} s"
    )
