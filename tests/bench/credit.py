"""Compares credit rules: model tokens and rollouts until a tiny model has learnt each of three small tasks.

    python -m tests.bench.credit [--seeds 5] [--steps 100] [--task sql rag tool] [--rule gigpo …] [--processes 2]

Each run starts from the same model (`credit_model.py`). It ends when the mean training reward of three consecutive steps reaches TARGET, or
after ``--steps`` steps; a run that did not reach it counts as that many steps and is marked with ``>``. Runs of one seed share tasks and
sampling seeds. Prints for each rule: the mean number of sampled tokens, those of forks too, and of rollouts over seeds, each with its
95 % interval (bootstrap) and the ratio to broadcast, and the number of seeds that reached TARGET. A step has 48 rollouts with every
rule: with rules that use forks, four attempts and four forks per task. The learning rate was tuned for broadcast (5e-4, 1e-3 or 2e-3)
and is used for all rules. The judge is not compared: the model is too small for judging. The tokens that igpo and a2tgpo score are not
among the sampled ones; their number is in the curves.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

TARGET = 0.8
WINDOW = 3
GROUP = 8
LEARNING_RATE = 1e-3
TASKS = ["sql", "rag", "tool"]
AIR = {"rules": [{"function": "tests.bench.credit_tasks:went_well", "weight": 0.2}]}
GAINS = "examples.rules.information_gain"
RULES: dict[str, dict[str, Any]] = {
    "broadcast": {},
    "last-call": {"rewards": "last-call", "group_by": ["task"]},
    "discounted": {"rewards": "discounted", "gamma": 0.9, "group_by": ["task"]},
    "broadcast + air": {"air": AIR},
    "discounted + air": {"rewards": "discounted", "gamma": 0.9, "group_by": ["task"], "air": AIR},
    "explicit + air": {"rewards": "explicit", "group_by": ["task"], "air": AIR},
    "gigpo": {"rewards": "gigpo", "gamma": 0.9},
    "gae": {"rewards": "gae", "gamma": 0.95, "lam": 0.9, "advantage": "reinforce++", "critic": {"learning_rate": 1e-2}},
    "dr-grpo": {"advantage": "dr-grpo"},
    "rloo": {"advantage": "rloo"},
    "reinforce++": {"advantage": "reinforce++"},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline"},
    "group by agent": {"group_by": ["task", "agent"]},
    "group by agent, turn": {"group_by": ["task", "agent", "turn"]},
    "discounted, by agent, turn": {"rewards": "discounted", "gamma": 0.9, "group_by": ["task", "agent", "turn"]},
    "counterfactual": {"rewards": "counterfactual"},
    "vine": {"rewards": "vine", "advantage": "reinforce++"},
    "tree": {"rewards": "examples.rules.tree:tree"},
    "igpo": {"rewards": "igpo", "rewards_args": {"after": "policy"}},
    "igpo, separate": {"rewards": f"{GAINS}:igpo_variant", "rewards_args": {"after": "policy"}},
    "a2tgpo": {"rewards": f"{GAINS}:a2tgpo", "rewards_args": {"after": "policy"}},
}

FORKS: dict[str, dict[str, Any]] = {
    "counterfactual": {"points": 2, "samples": 2},
    "vine": {"points": 2, "samples": 2},
    "tree": {"points": 2, "samples": 2},
}
"""``rollouts.forks`` of the rules that use forks."""
ANSWERS = {
    "sql": "tests.bench.credit_tasks:sql_answer",
    "rag": "tests.bench.credit_tasks:rag_answer",
}
"""``credit.information_gain.answer`` by task. *tool* has no answer: it is solved by steps."""


class Reached(Exception):
    """Mean training reward that ends a run."""


def run(task: str, rule: str, seed: int, steps: int, model: str) -> dict[str, Any]:
    """One training run in this process."""
    import torch

    from lightning_core import fit, load_config
    from lightning_core.observers.progress import SilentProgress

    torch.set_num_threads(1)
    curve: list[float] = []
    tokens: list[int] = []
    scored: list[int] = []
    own: dict[str, Any] = {"group_size": GROUP // 2, "forks": FORKS[rule]} if rule in FORKS else {}

    class Watch(SilentProgress):
        def step(self, step: int, total_steps: int, metrics: Any) -> None:
            curve.append(float(metrics["reward"]))
            tokens.append(int(metrics["tokens_sampled"] + metrics.get("tokens_forked", 0)))
            scored.append(int(metrics.get("tokens_scored", 0)))
            if len(curve) >= WINDOW and fmean(curve[-WINDOW:]) >= TARGET:
                raise Reached

    with tempfile.TemporaryDirectory() as folder:
        config = {
            "agent": f"tests.bench.credit_tasks:{task}",
            "tasks": {"train": "tests.bench.credit_tasks:tasks"},
            "policy": {"model": model, "max_context": 128, "dtype": "float32"},
            "rollouts": {"tasks_per_step": 6, "group_size": GROUP, "max_tokens": 3, "temperature": 1.0, **own},
            "trainer": {"steps": steps, "learning_rate": LEARNING_RATE, "checkpoint_every": 0, "threads": 1},
            "credit": {
                **RULES[rule],
                **({"information_gain": {"answer": ANSWERS[task]}} if needs_answer(rule) else {}),
            },
            "run": {"dir": folder, "name": "run", "seed": seed},
        }
        try:
            fit(config=load_config(config), progress=Watch())
        except Reached:
            return {"reached": True, "curve": curve, "tokens": tokens, "scored": scored}
    return {"reached": False, "curve": curve, "tokens": tokens, "scored": scored}


def needs_answer(rule: str) -> bool:
    return rule.startswith(("igpo", "a2tgpo"))


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of resampled means."""
    rng = np.random.default_rng(0)
    means = rng.choice(values, size=(10_000, len(values))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def report(task: str, results: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n{task}: until the mean reward of {WINDOW} steps is {TARGET}")
    baseline: dict[str, float] = {}
    for rule, runs in results.items():
        reached = sum(r["reached"] for r in runs)
        line = f"  {rule:28s}{' ' if reached == len(runs) else '>'}"
        for unit, counts in (
            ("tokens", [float(sum(r["tokens"])) for r in runs]),
            ("rollouts", [float(len(r["curve"]) * 6 * GROUP) for r in runs]),
        ):
            low, high = interval(counts)
            ratio = fmean(counts) / baseline.setdefault(unit, fmean(counts))
            line += f"{fmean(counts):7.0f} {unit} [{low:6.0f}, {high:6.0f}] {ratio:5.2f}x   "
        print(f"{line}{reached}/{len(runs)} seeds", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--rule", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--curves", type=Path, help="a file that each run's rewards are added to as it ends, as JSON lines"
    )
    options = parser.parse_args()
    from tests.bench.credit_model import make_reader

    rules = list(dict.fromkeys(["broadcast", *options.rule]))
    workers = ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"))
    with tempfile.TemporaryDirectory() as folder, workers:
        model = str(make_reader(Path(folder) / "model"))
        results: dict[tuple[str, str, int], dict[str, Any]] = {}
        compared = {task: [r for r in rules if task in ANSWERS or not needs_answer(r)] for task in options.task}
        wanted = [
            (task, rule, seed) for task in options.task for rule in compared[task] for seed in range(options.seeds)
        ]
        futures = {workers.submit(run, *what, options.steps, model): what for what in wanted}
        for future in as_completed(futures):
            task, rule, seed = what = futures[future]
            results[what] = future.result()
            if options.curves:
                line = json.dumps({"task": task, "rule": rule, "seed": seed, **results[what]})
                with options.curves.open("a") as file:
                    file.write(line + "\n")
    for task in options.task:
        report(task, {rule: [results[task, rule, seed] for seed in range(options.seeds)] for rule in compared[task]})


if __name__ == "__main__":
    main()
