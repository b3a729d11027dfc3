"""Compares decoding with several adapters per batch to decoding one adapter after the other.

    python -m tests.bench.adapters [--model smollm2-135m-instruct] [--adapters 4] [--rows 64]

Each adapter answers its share of the rows. A row has 200 tokens of prompt shared by all rows, 20 tokens of its own and 32 new tokens.
Prints tokens per second and the ratio, and the time of the same number of rows with a single adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Sequence

import torch

import lightning_core.trainers.plan  # noqa: F401 - before torch: sets how its threads wait
from lightning_core.backends.backend import SamplingParams
from lightning_core.model.source import resolve_model
from lightning_core.trainers.torch.multi_policy import MultiPolicyTrainer
from tests.trainers.sections import parts

PREFIX, OWN, NEW = 200, 20, 32


def sample(trainer: MultiPolicyTrainer, models: Sequence[str], seed: int) -> float:
    """Seconds for one response of each of ``models``, requested at the same time."""
    shared = random.Random(seed).choices(range(1000, 20000), k=PREFIX)
    params = SamplingParams(max_tokens=NEW, temperature=0.7)

    async def one(index: int, model: str) -> None:
        prompt = shared + random.Random(1000 * seed + index).choices(range(1000, 20000), k=OWN)
        async for _ in trainer.backend.generate(prompt, params, model=model):
            pass

    async def run() -> None:
        await asyncio.gather(*(one(*job) for job in enumerate(models)))

    began = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - began


@torch.no_grad()
def differ(trainer: MultiPolicyTrainer) -> None:
    """Set random adapter weights: untrained adapters add zero, which would hide mistakes."""
    for seed, policy in enumerate(trainer.policies.values()):
        generator = torch.Generator().manual_seed(seed)
        state = policy.state()
        for name, weight in state.weights.items():
            if name.endswith("lora_B"):
                weight.copy_(0.01 * torch.randn(weight.shape, generator=generator))
        policy.restore(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    names = [f"p{index}" for index in range(arguments.adapters)]
    own = parts(
        model=str(resolve_model(arguments.model)), tuning="lora", lora_rank=arguments.rank, dtype=arguments.dtype,
        device=arguments.device, max_batch=arguments.rows,
    )  # fmt: skip
    trainer = MultiPolicyTrainer(
        dict.fromkeys(names, own["policy"]), own["algorithm"], own["settings"], seed=own["seed"]
    )
    differ(trainer)
    share = arguments.rows // len(names)
    mixed = [name for _ in range(share) for name in names]
    sample(trainer, mixed, 0)  # the first time is slower
    best = {"mixed": 1e9, "one after the other": 1e9, "a single one": 1e9}
    for turn in range(1, arguments.rounds + 1):
        # Alternating, so that other load on the machine affects all of them equally.
        best["mixed"] = min(best["mixed"], sample(trainer, mixed, 3 * turn))
        apart = sum(sample(trainer, [name] * share, 3 * turn + 1) for name in names)
        best["one after the other"] = min(best["one after the other"], apart)
        best["a single one"] = min(best["a single one"], sample(trainer, [names[0]] * len(mixed), 3 * turn + 2))
    trainer.close()
    print(
        f"{arguments.model}: {len(mixed)} rows of {len(names)} adapters of rank {arguments.rank}, best of {arguments.rounds};"
    )
    print(
        f"{trainer.policies[names[0]].model.device}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    )
    tokens = len(mixed) * NEW
    for what, seconds in best.items():
        print(f"  {what:20s} {tokens / seconds:8.0f} tokens/s   {seconds:6.2f} s")
    print(f"  mixed against one after the other: {best['one after the other'] / best['mixed']:.2f}")
    print(f"  mixed against a single adapter:    {best['a single one'] / best['mixed']:.2f}")


if __name__ == "__main__":
    main()
