"""What ``trainer.deterministic`` costs, and whether responses are the same to the bit at any concurrency and in any order.

    python -m tests.bench.deterministic [--model smollm2-135m-instruct] [--dtype float32 bfloat16] [--rounds 3]

Groups of samples at prompts with a common beginning, each of two turns, as an agent makes them. Both engines sample in turns in one
process, so the ratio of their CPU times does not depend on the machine's load. Rounds have 16, 4 and 1 requests at a time, in
different orders.
"""

from __future__ import annotations

import lightning_core.trainers.plan  # noqa: F401 - before torch: sets how its threads wait

# isort: split
import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from lightning_core.backends.backend import Backend, SamplingParams
from lightning_core.trainers.torch.factory import open_trainer
from tests.trainers.sections import parts

Response = tuple[Sequence[int], Sequence[float]]
GROUPS, SAMPLES, TOKENS = 4, 4, 24


def make_prompts(vocabulary: int) -> list[list[int]]:
    """Prompts of groups, which share their first 60 tokens."""
    rng = random.Random(1)
    common = rng.choices(range(3, vocabulary), k=60)
    prompts = [common + rng.choices(range(3, vocabulary), k=rng.randrange(10, 90)) for _ in range(GROUPS)]
    return [prompt for prompt in prompts for _ in range(SAMPLES)]


async def sample(backend: Backend, prompts: Sequence[list[int]], concurrency: int, seed: int) -> list[Response]:
    """The responses of two turns at each prompt, in the order of ``prompts``; ``seed`` shuffles their arrival."""
    free = asyncio.Semaphore(concurrency)
    found: dict[int, Response] = {}

    async def turn(prompt: list[int], number: int, most: int) -> Response:
        params = SamplingParams(max_tokens=most, temperature=0.7, seed=number)
        deltas = [delta async for delta in backend.generate(prompt, params, model="policy")]
        return [t for d in deltas for t in d.token_ids], [p for d in deltas for p in d.logprobs]

    async def agent(number: int) -> None:
        async with free:
            first = await turn(prompts[number], number, TOKENS)
            second = await turn([*prompts[number], *first[0], 5, 6, 7, number], 1000 + number, TOKENS // 2)
            found[number] = ([*first[0], *second[0]], [*first[1], *second[1]])

    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    await asyncio.gather(*map(agent, order))
    return [found[number] for number in range(len(prompts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[16, 4, 1])
    parser.add_argument("--rounds", type=int, default=3, help="for each concurrency")
    arguments = parser.parse_args()
    for dtype in arguments.dtype:
        settings: dict[str, Any] = {
            "model": arguments.model,
            "dtype": dtype,
            "threads": arguments.threads,
            "micro_batch_tokens": 2048,  # by default free memory decides, which `deterministic` refuses
        }
        engines = [open_trainer(**parts(**settings, deterministic=on)) for on in (False, True)]
        prompts = make_prompts(engines[0].model.vocabulary)
        print(f"{arguments.model}, {engines[0].model.network.dtype}, {torch.get_num_threads()} threads", flush=True)
        first: list[list[Response]] = []
        for concurrency in arguments.concurrency:
            cpu, equal = [0.0, 0.0], [0, 0]
            for number in range(arguments.rounds):
                for which, engine in enumerate(engines):
                    engine.backend.forget_contexts()
                    began = time.process_time()
                    found = asyncio.run(sample(engine.backend, prompts, concurrency, number))
                    cpu[which] += time.process_time() - began
                    if len(first) <= which:
                        first.append(found)
                    equal[which] += sum(a == b for a, b in zip(found, first[which], strict=True))
            total = len(prompts) * arguments.rounds
            print(
                f"  {concurrency:2d} at a time: equal to the bit {equal[0]}/{total} off, {equal[1]}/{total} on; "
                f"cpu {cpu[0]:.2f} s off, {cpu[1]:.2f} s on: {cpu[1] / cpu[0]:.2f} x",
                flush=True,
            )
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
