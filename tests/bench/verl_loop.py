"""Compares our manager with verl's own agent loop: rollouts per second in verl's trainer, with vLLM, in one run.

    python -m tests.bench.verl_loop [--tokens 256] [--tasks 32] [--steps 4] [--repeats 2] [--scratch FOLDER]

Both train the same tiny model on the same tasks on this machine's CPU. A rollout is one question and one response of exactly TOKENS
tokens. A step has TASKS groups of eight. The arms alternate; each run is a process with its own Ray cluster:

- *verl*: its default ``AgentLoopManagerTQ`` with ``single_turn_agent``, the reward from verl's reward loop, GRPO and verl's own loss;
- *ours*: `LightningManager`, an agent that calls the model with the openai package, and our policy endpoint, run by `train_with_verl`.

Both use a replay buffer that polls ten times per second (verl's own polls every two seconds, which would hide the differences).
Generation is verl's ``timing_s/gen``; a step is ``timing_s/step`` without checkpoints. The first step of each run is not counted: it
warms up, and our manager waits in it for all rollouts to check that there is something to train on. The update is the same work in both
arms: if its time differs, the machine had other load, and the ratios are not reliable. CPU time is per rollout, by kind of process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.ray_processes import Known, cpu_by_kind, end
from tests.verl.cpu import ENVIRONMENT, SETTINGS

GROUP = 8
ARMS = ("verl", "ours")
_MODULE = "tests.bench.verl_agents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of one arm: seconds of each step except the first, and CPU seconds by kind of process."""

    generation: Sequence[float]
    whole: Sequence[float]
    update: Sequence[float]
    prompt_tokens: float
    response_tokens: float
    cpu: Mapping[str, float]


def configuration(options: Any, folder: Path, ray_folder: Path) -> Any:
    """Our configuration, as a user would write it for a machine without an accelerator."""
    from lightning_core import load_config

    rollouts = options.tasks * GROUP
    return load_config({
        "agent": f"{_MODULE}:ask_once",
        "tasks": {"train": {"source": f"{_MODULE}:tasks", "args": {"count": options.tasks * options.steps}}},
        "agents": {"train": ["asker"]},
        "policy": {"model": str(folder.parent / "model"), "max_context": options.tokens + 256, "dtype": "float32"},
        "rollouts": {
            "tasks_per_step": options.tasks,
            "group_size": GROUP,
            "max_tokens": options.tokens,
            "concurrency": rollouts,
            "timeout_seconds": 300,
        },
        "trainer": {
            "name": "verl",
            "steps": options.steps,
            "learning_rate": 1e-6,
            "rollout_workers": 1,
            "micro_batch_tokens": 32768,
            "checkpoint_every": 0,
            "verl": {
                **SETTINGS,
                "actor_rollout_ref.rollout.max_num_seqs": 64,
                "actor_rollout_ref.rollout.max_num_batched_tokens": 4096,
                "trainer.v1.sampler.custom_sampler.path": "pkg://tests.bench.verl_sampler",
                "trainer.v1.sampler.custom_sampler.name": "EagerReplayBuffer",
                "+ray_kwargs.ray_init._temp_dir": str(ray_folder),
            },
        },
    })  # fmt: skip


THEIRS = {
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": None,
    "reward.custom_reward_function.path": f"pkg://{_MODULE}",
    "reward.custom_reward_function.name": "score",
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
}
"""verl's own components in place of ours."""


def train(arm: str, options: Any, folder: Path, ray_folder: Path) -> None:
    """Run one arm in this process."""
    from lightning_core.records.observer import Observers
    from lightning_core.rollouts.prepare import Inputs
    from lightning_core.trainers.plan import Plan
    from lightning_core.trainers.verl.dataset import write_tasks
    from lightning_core.trainers.verl.train import train_with_verl, verl_config
    from tests.bench.verl_agents import ask_once, tasks

    folder.mkdir(parents=True)
    config = configuration(options, folder, ray_folder)
    (folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    made = tasks(options.tasks * options.steps)
    if arm == "ours":
        train_with_verl(
            Plan(
                config=config,
                folder=folder,
                checkpoint=None,
                inputs=Inputs(solve=ask_once, reward=None, tasks=made),
                observers=Observers(),
            )
        )
        return
    from omegaconf import OmegaConf
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    write_tasks(folder / "tasks_train.jsonl", made)
    found = verl_config(config, folder)
    for key, value in THEIRS.items():
        OmegaConf.update(found, key, value, force_add=True)
    run_ppo(found, task_runner_class=TaskRunnerV1)


def measure(arm: str, options: Any, folder: Path) -> Measured:
    """Run one arm in a new process. It is killed with all its children when it exceeds the time limit."""
    # Ray's sockets are in its folder, and paths of sockets must be short.
    ray_folder = Path(tempfile.mkdtemp(prefix="lvb", dir="/tmp"))
    command = [sys.executable, "-m", "tests.bench.verl_loop", "--arm", arm, "--scratch", str(folder)]
    command += [f"--{key}={getattr(options, key)}" for key in ("tokens", "tasks", "steps")]
    command += ["--ray-folder", str(ray_folder)]
    log = folder.with_suffix(".log")
    with log.open("w") as sink:
        child = subprocess.Popen(
            command, stdout=sink, stderr=sink, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        )
    spent: dict[int, dict[str, float]] = {}
    tree: Known = {}
    deadline = time.monotonic() + options.timeout
    try:
        while child.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{arm} took more than {options.timeout} s; {log}")
            time.sleep(0.25)
            steps = steps_of(folder)
            if steps and steps[-1]["step"] not in spent:
                spent[steps[-1]["step"]] = cpu_by_kind(child.pid, tree)
        if child.returncode:
            raise RuntimeError(f"{arm} ended with exit code {child.returncode}; {log}")
    finally:
        end(child, tree)
        shutil.rmtree(ray_folder, ignore_errors=True)
    steps = steps_of(folder)[1:]
    data = [step["data"] for step in steps]
    first, last = spent[min(spent)], spent[max(spent)]
    rollouts = (max(spent) - min(spent)) * options.tasks * GROUP
    return Measured(
        generation=[d["timing_s/gen"] for d in data],
        whole=[d["timing_s/step"] - d.get("timing_s/save_checkpoint", 0.0) for d in data],
        update=[d["timing_s/update_actor"] for d in data],
        prompt_tokens=statistics.mean(d["prompt_length/mean"] for d in data),
        response_tokens=statistics.mean(d["response_length/mean"] for d in data),
        cpu={kind: (seconds - first.get(kind, 0.0)) / rollouts for kind, seconds in last.items()},
    )


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """verl's log entries of each step."""
    log = folder / "verl.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else []
    entries = [json.loads(line) for line in lines]
    return [entry for entry in entries if "timing_s/step" in entry["data"]]


def report(options: Any, runs: Mapping[str, Sequence[Measured]]) -> None:
    rollouts = options.tasks * GROUP
    print(
        f"{'':6s}{'prompt':>8s}{'response':>10s}{'generation':>24s}{'update':>24s}{'whole step':>24s}{'rollouts/s':>12s}"
    )
    for arm, several in runs.items():
        for run in several:
            cells = "".join(
                f"{statistics.mean(s):8.2f} s ({min(s):.2f}-{max(s):.2f})".rjust(24)
                for s in (run.generation, run.update, run.whole)
            )
            speed = rollouts / statistics.mean(run.generation)
            print(f"{arm:6s}{run.prompt_tokens:8.1f}{run.response_tokens:10.1f}{cells}{speed:12.1f}")
    for name in ("generation", "whole"):
        means = {arm: [statistics.mean(getattr(r, name)) for r in several] for arm, several in runs.items()}
        ratio = statistics.mean(means["verl"]) / statistics.mean(means["ours"])
        each = ", ".join(f"{a / b:.3f}" for a, b in zip(means["verl"], means["ours"], strict=True))
        print(f"{name}: ours {ratio:.3f}x as fast as verl's ({each}; target 0.98)")
    kinds = sorted({kind for several in runs.values() for run in several for kind in run.cpu})
    print("CPU ms a rollout, whole steps: " + "; ".join(f"{k} " + " / ".join(
        f"{statistics.mean(r.cpu.get(k, 0.0) for r in runs[arm]) * 1000:.1f}" for arm in runs) for k in kinds
    ) + f" ({' / '.join(runs)})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each response")
    parser.add_argument("--tasks", type=int, default=32, help="tasks per step, with eight rollouts each")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run; the first is not counted")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each arm")
    parser.add_argument("--timeout", type=float, default=600, help="time limit of a run in seconds")
    parser.add_argument("--scratch", type=Path, help="folder for the files of the runs; default: a temporary one")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--ray-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        train(options.arm, options, options.scratch, options.ray_folder)
        return
    from tests.bench.verl_agents import make_endless_model

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises SystemExit, so that started processes are ended
    made = tempfile.mkdtemp(prefix="lightning-bench-")
    scratch = options.scratch or Path(made)
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        make_endless_model(scratch / "model")
        print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
        runs: dict[str, list[Measured]] = {arm: [] for arm in ARMS}
        for repeat in range(options.repeats):
            for arm in ARMS if repeat % 2 == 0 else ARMS[::-1]:
                print(f"{arm}, run {repeat + 1}: load {os.getloadavg()[0]:.1f} …", file=sys.stderr, flush=True)
                runs[arm].append(measure(arm, options, scratch / f"{arm}{repeat}"))
        report(options, runs)
    finally:
        shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    main()
