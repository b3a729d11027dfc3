"""Measures the memory settings: wall time and peak memory of one training step, and the memory of running responses. Linux only.

    python -m tests.bench.memory [--model smollm2-135m-instruct] [--rows 8] [--prompt 512] [--response 256]
    python -m tests.bench.memory --cases --running 64 --private 8192 --new 32 --planned-mib 96
    python -m tests.bench.memory --agent 6

Rows share no prefix, so that a micro-batch has its full length. Each case runs in its own process. Its peak is the largest resident memory
during the step minus the resident memory before it. A small first step loads weights and optimiser into memory.

The second part samples ``--running`` responses to private prompts of ``--private`` tokens with a tiny model, without a bound and with
``--planned-mib`` planned for them, on both paths (docs/models.md). Held are the bytes of their keys, values and masks, at most after a
step.

``--agent`` measures a run of a long agent instead; see `tests.bench.agent_memory`.
"""

from __future__ import annotations

import lightning_core.trainers.plan  # noqa: F401 - before torch: sets how its threads wait

# isort: split
import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.cache_check import bytes_per_token
from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.model.compute import choose_path, plain_path
from lightning_core.model.memory import cached_bytes, steady_bytes
from lightning_core.model.source import load_model, resolve_model
from lightning_core.trainers.torch.factory import open_trainer
from tests.bench.agent_memory import measure_agent, show_agent
from tests.tiny_model import make_tiny_model
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


def measure_running(arguments: argparse.Namespace, planned: int | None) -> None:
    """Sample ``arguments.running`` responses with ``planned`` bytes for them; None: no bound."""
    with tempfile.TemporaryDirectory() as folder:
        model: Any = load_model(make_tiny_model(Path(folder) / "model", arch="llama"), torch.float32)
    path = plain_path(model, "it is measured", attention="sdpa") if arguments.plain else choose_path(model)
    token = bytes_per_token(model, path.cache) if path.geometry is None else cached_bytes(path.geometry, torch.float32)
    backend = TorchBackend(
        {"policy": SampledModel(model=model, path=path)},
        max_context=arguments.private + arguments.new, max_batch=arguments.running, gather_ms=200, seed=0, cached_tokens=0,
        row_bytes=planned,
    )  # fmt: skip
    lane: Any = backend._lanes["policy"]
    held, together, step = [0], [0], lane.step

    def noted() -> None:
        step()
        held.append(lane.held_bytes)
        together.append(len(lane.rows))

    lane.step = noted

    async def sample() -> int:
        async def one(number: int) -> int:
            prompt = random.Random(number).choices(range(256), k=arguments.private)
            params = SamplingParams(max_tokens=arguments.new)
            return sum([len(delta.token_ids) async for delta in backend.generate(prompt, params, model="policy")])

        return sum(await asyncio.gather(*map(one, range(arguments.running))))

    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    wall, cpu = time.perf_counter(), time.process_time()
    sampled = asyncio.run(sample())
    found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "sampled": sampled}
    peak = resident("VmHWM") - before
    backend.close()
    print(
        json.dumps(
            {**found, "token": token, "held": max(held), "rows": max(together), "waited": lane.preempted, "peak": peak}
        )
    )


def show_running(arguments: argparse.Namespace) -> None:
    mib = 2**20
    most = int(arguments.planned_mib * mib)
    for plain, planned in ((False, None), (False, most), (True, None), (True, most)):
        found = run_case("--planned", json.dumps(planned), *(["--plain"] if plain else []))
        if not plain and planned is None:
            needed = arguments.running * (arguments.private + arguments.new) * found["token"] / mib
            print(
                f"{arguments.running} running responses of {arguments.private:,} private and {arguments.new:,} new tokens, a tiny model of "
                f"{found['token']} bytes per token: {needed:,.0f} MiB of keys and values"
            )
        bound = (
            "no bound"
            if planned is None
            else f"planned {planned / mib:,.0f} MiB, bound {steady_bytes(planned) / mib:,.0f} MiB"
        )
        print(
            f"  {'plain' if plain else 'tree'} path, {bound:28s} held {found['held'] / mib:6.1f} MiB   "
            f"peak +{found['peak'] * 1024:6.1f} MiB   {found['rows']:3d} together   "
            f"{found['waited']:3d} waited again   {found['sampled']:6d} tokens   wall {found['wall']:6.1f} s   cpu {found['cpu']:6.1f} s",
            flush=True,
        )


def run_case(*options: str) -> Any:
    """The result of this command with ``options``, in its own process."""
    command = [sys.executable, "-m", "tests.bench.memory", *sys.argv[1:], *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--private", type=int, default=8192)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--planned-mib", type=float, default=96)
    parser.add_argument("--planned", help="measure the running responses in this process: planned bytes, or null")
    parser.add_argument("--plain", action="store_true", help="measure them on the plain path")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--options", help="measure one case in this process: settings (see tests/trainers/sections.py) as JSON"
    )
    parser.add_argument("--agent", type=float, metavar="GB", help="only a run of a long agent, planned for so many GB")
    parser.add_argument("--inside", action="store_true", help="measure that run in this process")
    arguments = parser.parse_args()
    if arguments.agent is not None:
        return (
            measure_agent(arguments.model, arguments.agent)
            if arguments.inside
            else show_agent(run_case, arguments.agent)
        )
    if arguments.planned is not None:
        return measure_running(arguments, json.loads(arguments.planned))
    if arguments.options is not None:
        return measure(arguments, json.loads(arguments.options))
    print(
        f"{arguments.model}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}: {arguments.rows} rows of "
        f"{arguments.prompt} + {arguments.response} tokens"
    )
    for name in arguments.cases:
        found = run_case("--options", json.dumps(CASES[name]))
        print(
            f"  {name:30s} {found['wall']:6.1f} s   +{found['peak']:5.2f} GiB in the step, {found['before']:.2f} before it   "
            f"({found['micro_batches']:.0f} micro-batches)",
            flush=True,
        )
    return show_running(arguments)


if __name__ == "__main__":
    main()
