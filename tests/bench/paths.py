"""CPU time of sampling on the plain path and on the tree path, with the same weights and prompts, in one process.

``python -m tests.bench.engine --paths`` prints it. The model has random weights and all layers that the tree path needs; on the
plain path it is computed as a model that has other ones. "Rows of equal length only" is the plain path of a model whose cache
cannot be used for more.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_core.backends.backend import Backend, Delta, SamplingParams
from lightning_core.backends.torch import lanes
from lightning_core.backends.torch.cache_check import CacheSupport
from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.model.compute import ComputePlan, choose_path, plain_path
from lightning_core.model.source import load_model
from tests.engine_stats import stats_of
from tests.model.families import Family, make_family

SIZE = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 2048,
}  # fmt: skip
PREFIX, QUESTIONS, RESULTS = 200, (20, 60), (20, 50)
"""Tokens of the prompts' common prefix; the range of each question and of each tool result."""
PROMPTS, SAMPLES, NEW, TURNS = 4, 4, (8, 40), 3


class Measured(NamedTuple):
    cpu: list[float]
    """Seconds per turn."""
    passes: list[int]
    """Forward passes per turn."""
    computed: int
    """Prompt tokens computed."""


def compare_paths() -> None:
    """Print the CPU time of an agent with several turns on each path, and its ratio to the tree path."""
    with tempfile.TemporaryDirectory() as folder:
        model: Any = load_model(make_family(Family("llama", SIZE), Path(folder)), torch.float32)
    tree = choose_path(model)
    found = {"tree": measure(model, tree)}
    plain = plain_path(model, "measured", attention=tree.replaced)
    found["plain"] = measure(model, plain)
    with _grouped():
        found["plain, rows of equal length only"] = measure(model, plain)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{PROMPTS} prompts of {PREFIX} common and {QUESTIONS} other tokens, {SAMPLES} rows each, {NEW} new tokens, {TURNS} turns; "
        f"{size:.0f}M weights, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    )
    for name, (cpu, passes, computed) in found.items():
        ratio = sum(cpu) / sum(found["tree"].cpu)
        turns = ", ".join(f"{seconds:.2f}" for seconds in cpu)
        print(
            f"  {name:33s} cpu {sum(cpu):6.2f} s ({turns})  {ratio:5.2f} x tree  {sum(passes):4d} passes {passes}"
            f"  {computed} prompt tokens computed", flush=True,
        )  # fmt: skip


def measure(model: Any, path: ComputePlan) -> Measured:
    """Sample the turns of the agent on ``path``."""
    backend = TorchBackend(
        {"policy": SampledModel(model=model, path=path)}, max_context=2048, max_batch=64, gather_ms=50, seed=0
    )
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = model.get_input_embeddings().register_forward_hook(count)
    try:
        drawn = random.Random(0)
        asyncio.run(_turn(backend, [[1, 2, 3]], drawn))  # warm up
        backend.forget_contexts()
        before = stats_of(backend).prompt_tokens_computed
        prompts = _prompts(drawn)
        cpu, counts = list[float](), list[int]()
        for _ in range(TURNS):
            start, passes = time.process_time(), 0
            deltas = asyncio.run(_turn(backend, prompts, drawn))
            cpu.append(time.process_time() - start)
            counts.append(passes)
            prompts = [
                [*prompt, *delta.token_ids, *_tokens(drawn, RESULTS)]
                for prompt, delta in zip(prompts, deltas, strict=True)
            ]
        return Measured(cpu, counts, stats_of(backend).prompt_tokens_computed - before)
    finally:
        hook.remove()
        backend.close()


def _prompts(drawn: random.Random) -> list[list[int]]:
    prefix = _tokens(drawn, (PREFIX, PREFIX))
    return [
        prompt for prompt in ([*prefix, *_tokens(drawn, QUESTIONS)] for _ in range(PROMPTS)) for _ in range(SAMPLES)
    ]


def _tokens(drawn: random.Random, length: tuple[int, int]) -> list[int]:
    return drawn.choices(range(3, 250), k=drawn.randint(*length))


async def _turn(backend: Backend, prompts: Sequence[list[int]], drawn: random.Random) -> list[Delta]:
    async def one(prompt: list[int], seed: int) -> Delta:
        params = SamplingParams(max_tokens=NEW[0] + seed % (NEW[1] - NEW[0]), seed=seed)
        return [delta async for delta in backend.generate(prompt, params, model="policy")][-1]

    return await asyncio.gather(*(one(prompt, drawn.randrange(1 << 30)) for prompt in prompts))


@contextmanager
def _grouped() -> Iterator[None]:
    """Use a model's cache as if it were exact for rows of equal length only."""
    before = lanes.check_cache
    lanes.check_cache = lambda model, cache: CacheSupport()
    try:
        yield
    finally:
        lanes.check_cache = before
