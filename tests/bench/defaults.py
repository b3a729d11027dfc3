"""Judges a default: trains six small agents with and without a change, for about the same time.

    python -m tests.bench.defaults [--change rollouts.refill=4] [--agents extract route …] [--seeds 3] [--seconds 100]

Each agent of `small_agents` is trained from the demo model. The number of steps is what fits into ``--seconds`` of rollouts
and updates, from a trial of two steps with the same settings. Seconds are processor seconds of the training process, so that
other load on the machine matters little. Prints held-out rewards before and after, the seconds that training took, and for
each change the mean difference to the defaults over agents and seeds, with its 95% interval.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lightning_core.observers.progress import SilentProgress
from tests.bench.bootstrap import over_seeds
from tests.bench.small_agents import AGENTS, split


def settings(agent: str, changes: Sequence[str], *, steps: int, seed: int, folder: str) -> dict[str, Any]:
    """The configuration of a run."""
    found: dict[str, Any] = {
        "agents": {"train": list(AGENTS[agent].train)},
        "policy": {"model": "smollm2-135m-instruct", "train_layers": 15, "max_context": 512},
        "rollouts": {"tasks_per_step": 8, "group_size": 8, "temperature": 0.7, "max_tokens": 28},
        "trainer": {"steps": steps, "learning_rate": 5e-5, "betas": [0.9, 0.95], "checkpoint_every": 0},
        "eval": {"tasks": 80},
        "run": {"dir": folder, "seed": seed},
    }
    for change in changes:
        keys, _, value = change.partition("=")
        section, _, key = keys.partition(".")
        found.setdefault(section, {})[key] = json.loads(value)
    return found


def train(agent: str, changes: Sequence[str], *, steps: int, seed: int, held_out: int) -> dict[str, Any]:
    """Train in a process of its own; returns rewards and seconds."""
    work = {"agent": agent, "changes": list(changes), "steps": steps, "seed": seed, "held_out": held_out}
    command = [sys.executable, "-m", "tests.bench.defaults", "--one", json.dumps(work)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


class StepClock(SilentProgress):
    """The processor seconds of this process during steps, without loading and evaluations."""

    seconds = 0.0
    _began: float | None = None

    def phase(self, name: str, total: int | None = None) -> None:
        if name == "train" and self._began is None:
            self._began = time.process_time()

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        assert self._began is not None, "every step begins with the phase train"
        self.seconds += time.process_time() - self._began
        self._began = None


def train_here(work: Mapping[str, Any]) -> None:
    """The work of `train`, in this process; prints its result."""
    import lightning_core.trainers.plan  # noqa: F401 - before torch: sets how its threads wait
    from lightning_core import Config, fit

    clock = StepClock()
    tasks, held_out = split(work["agent"], train=400, held_out=80)
    small = AGENTS[work["agent"]]
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            **settings(work["agent"], work["changes"], steps=work["steps"], seed=work["seed"], folder=folder)
        )
        result = fit(
            small.solve, config=config, tasks=tasks, eval_tasks=held_out if work["held_out"] else [], progress=clock
        )
    found = {
        "steps": work["steps"],
        "seconds": clock.seconds,
        "equal": fmean(step["groups_equal"] for step in result.metrics),
    }
    if result.summary.eval is not None:
        found |= {"before": result.summary.eval.eval_reward_before, "after": result.summary.eval.eval_reward_after}
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--change", action="append", default=[], help="a setting that differs from the default")
    parser.add_argument("--agents", nargs="+", choices=list(AGENTS), default=list(AGENTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train_here(json.loads(arguments.one))
    else:
        judge(arguments)


def judge(arguments: argparse.Namespace) -> None:
    """Train every agent with every seed, with the defaults and with the changes; prints the table."""
    settings_of = {"defaults": [], **({" ".join(arguments.change): arguments.change} if arguments.change else {})}
    after: dict[str, list[float]] = {name: [] for name in settings_of}
    print(f"{'agent':<10} {'seed':>4} {'before':>7} {'after':>6} {'steps':>6} {'seconds':>8}  settings")
    for agent in arguments.agents:
        for seed in range(arguments.seeds):
            for name, changes in settings_of.items():
                trial = train(agent, changes, steps=2, seed=seed, held_out=False)
                steps = max(2, round(arguments.seconds * trial["steps"] / trial["seconds"]))
                found = train(agent, changes, steps=steps, seed=seed, held_out=True)
                after[name].append(found["after"])
                figures = f"{found['before']:7.2f} {found['after']:6.2f} {found['steps']:6d} {found['seconds']:8.0f}"
                print(f"{agent:<10} {seed:4d} {figures}  {name}", flush=True)
    for name, rewards in after.items():
        line = f"{name}: {fmean(rewards):.3f} after training"
        if name != "defaults":
            change = over_seeds([r - d for d, r in zip(after["defaults"], rewards, strict=True)])
            line += (
                f", {change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}] to the defaults over {len(rewards)} runs"
            )
        print(line)


if __name__ == "__main__":
    main()
