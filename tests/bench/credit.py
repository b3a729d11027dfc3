"""Credit rules side by side: how many rollouts until a tiny model has learnt each of the three examples in miniature.

    python -m tests.bench.credit [--seeds 5] [--steps 60] [--task sql rag tool] [--rule gigpo …] [--processes 2]

Each run starts from the same model (`credit_model.py`) and ends when the mean training reward of three steps in a row reaches TARGET, or
after ``--steps`` steps, which counts as that many and is marked with ``>``. Runs of one seed share their tasks and sampling seeds. Printed
for each rule: the mean number of rollouts over seeds with its 95 % interval (bootstrap), its ratio to broadcast, and how many seeds
got there. Learning rate and group size are those of broadcast: found for it, not for the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

TARGET = 0.8
WINDOW = 3
GROUP = 8
LEARNING_RATE = {"sql": 2e-3, "rag": 2e-3, "tool": 2e-3}
AIR = {"rules": [{"function": "tests.bench.credit_tasks:went_well", "weight": 0.2}]}
RULES: dict[str, dict[str, Any]] = {
    "broadcast": {},
    "last-call": {"rewards": "last-call"},
    "discounted": {"rewards": "discounted", "gamma": 0.9},
    "broadcast + air": {"air": AIR},
    "discounted + air": {"rewards": "discounted", "gamma": 0.9, "air": AIR},
    "explicit + air": {"rewards": "explicit", "air": AIR},
    "gigpo": {"rewards": "gigpo", "gamma": 0.9},
    "gae": {"rewards": "gae", "gamma": 0.95, "lam": 0.9, "advantage": "reinforce++", "critic": {"learning_rate": 1e-2}},
    "dr-grpo": {"advantage": "dr-grpo"},
    "rloo": {"advantage": "rloo"},
    "reinforce++": {"advantage": "reinforce++"},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline"},
    "group by agent": {"group_by": ["task", "agent"]},
    "group by agent, turn": {"group_by": ["task", "agent", "turn"]},
    "discounted, by agent, turn": {"rewards": "discounted", "gamma": 0.9, "group_by": ["task", "agent", "turn"]},
}


class Reached(Exception):
    """The target."""


def run(task: str, rule: str, seed: int, steps: int, model: str) -> dict[str, Any]:
    """One training run in this process."""
    import torch

    from lightning_core import fit, load_config
    from lightning_core.progress import SilentProgress

    torch.set_num_threads(1)
    curve: list[float] = []

    class Watch(SilentProgress):
        def step(self, step: int, total: int, metrics: Any) -> None:
            curve.append(float(metrics["reward"]))
            if len(curve) >= WINDOW and fmean(curve[-WINDOW:]) >= TARGET:
                raise Reached

    with tempfile.TemporaryDirectory() as folder:
        config = {
            "agent": f"tests.bench.credit_tasks:{task}",
            "tasks": {"train": "tests.bench.credit_tasks:tasks"},
            "policy": {"model": model, "max_context": 128, "dtype": "float32"},
            "rollouts": {"tasks_per_step": 6, "group_size": GROUP, "max_tokens": 3, "temperature": 1.0},
            "trainer": {"steps": steps, "learning_rate": LEARNING_RATE[task], "checkpoint_every": 0, "threads": 1},
            "credit": RULES[rule],
            "run": {"dir": folder, "name": "run", "seed": seed},
        }
        try:
            fit(config=load_config(config), progress=Watch())
        except Reached:
            return {"reached": True, "curve": curve}
    return {"reached": False, "curve": curve}


def interval(values: list[float]) -> tuple[float, float]:
    """95 % of the means of resamples."""
    rng = np.random.default_rng(0)
    means = rng.choice(values, size=(10_000, len(values))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def report(task: str, results: dict[str, list[dict[str, Any]]]) -> None:
    print(
        f"\n{task}: rollouts until the mean reward of {WINDOW} steps is {TARGET}, at a learning rate of {LEARNING_RATE[task]:g}"
    )
    baseline: float | None = None
    for rule, runs in results.items():
        counts = [float(len(r["curve"]) * 6 * GROUP) for r in runs]
        low, high = interval(counts)
        reached = sum(r["reached"] for r in runs)
        baseline = fmean(counts) if baseline is None else baseline
        mark = " " if reached == len(runs) else ">"
        print(
            f"  {rule:28s}{mark}{fmean(counts):6.0f} [{low:5.0f}, {high:5.0f}]   {fmean(counts) / baseline:5.2f} of broadcast"
            f"   {reached}/{len(runs)} seeds",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--task", nargs="+", choices=list(LEARNING_RATE), default=list(LEARNING_RATE))
    parser.add_argument("--rule", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--one", nargs=3, metavar=("TASK", "RULE", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task, rule, model = options.one
        print(json.dumps(run(task, rule, options.seed, options.steps, model)))
        return
    from tests.bench.credit_model import make_reader

    rules = list(dict.fromkeys(["broadcast", *options.rule]))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        model = str(make_reader(Path(folder) / "model"))

        def one(task: str, rule: str, seed: int) -> dict[str, Any]:
            command = [sys.executable, "-m", "tests.bench.credit", "--one", task, rule, model]
            more = ["--seed", str(seed), "--steps", str(options.steps)]
            done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{task}, {rule}, seed {seed} failed:\n{done.stderr[-2000:]}")
            return json.loads(done.stdout.splitlines()[-1])

        for task in options.task:
            pending = {rule: [pool.submit(one, task, rule, seed) for seed in range(options.seeds)] for rule in rules}
            report(task, {rule: [future.result() for future in futures] for rule, futures in pending.items()})


if __name__ == "__main__":
    main()
