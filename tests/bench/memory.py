"""Measures the memory settings: wall time and peak memory of one training step. Linux only.

    python -m tests.bench.memory [--model smollm2-135m-instruct] [--rows 8] [--prompt 512] [--response 256]

Rows share no prefix, so that a micro-batch has its full length. Each case runs in its own process. Its peak is the largest resident memory
during the step minus the resident memory before it. A small first step loads weights and optimiser into memory.
"""

from __future__ import annotations

import lightning_core.trainers.plan  # noqa: F401 - before torch: sets how its threads wait

# isort: split
import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lightning_core.model.source import resolve_model
from lightning_core.trainers.torch.factory import open_trainer
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, micro-batches of 1,024": {"micro_batch_tokens": 1024},
    "full, gradient checkpointing": {"gradient_checkpointing": True},
    "full, both": {"gradient_checkpointing": True, "micro_batch_tokens": 1024},
    "full, bfloat16 weights": {"dtype": "bfloat16"},
    "top 15 layers": {"train_layers": 15},
    "lora": {"tuning": "lora"},
    "lora, gradient checkpointing": {"tuning": "lora", "gradient_checkpointing": True},
}


def resident(what: str) -> float:
    """``VmRSS`` or ``VmHWM``, in GiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 2**20


def measure(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    folder = resolve_model(arguments.model)
    trainer = open_trainer(**parts(model=str(folder), **options))
    rng = random.Random(0)

    def row(prompt: int, response: int, number: int) -> Any:
        tokens = rng.choices(range(20000), k=prompt + response)
        return make_row(
            (tokens[:prompt], False), (tokens[prompt:], True), rollout=str(number), logprobs=[-9.0] * response
        )

    trainer.step([row(16, 8, 0)])
    rows = [row(arguments.prompt, arguments.response, number) for number in range(arguments.rows)]
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begun = time.perf_counter()
    metrics = trainer.step(rows)
    wall = time.perf_counter() - begun
    peak = resident("VmHWM") - before
    trainer.close()
    print(json.dumps({"wall": wall, "before": before, "peak": peak, "micro_batches": metrics["micro_batches"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--options", help="measure one case in this process: settings (see tests/trainers/sections.py) as JSON"
    )
    arguments = parser.parse_args()
    if arguments.options is not None:
        return measure(arguments, json.loads(arguments.options))
    print(
        f"{arguments.model}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}: {arguments.rows} rows of "
        f"{arguments.prompt} + {arguments.response} tokens"
    )
    for name in arguments.cases:
        command = [
            sys.executable,
            "-m",
            "tests.bench.memory",
            *sys.argv[1:],
            "--options",
            json.dumps(CASES[name]),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"  {name:30s} {found['wall']:6.1f} s   +{found['peak']:5.2f} GiB in the step, {found['before']:.2f} before it   "
            f"({found['micro_batches']:.0f} micro-batches)",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
