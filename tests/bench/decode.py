"""CPU time of a decoding step, and of the products with the model's weights alone, in one process.

``python -m tests.bench.engine --decode`` prints it: rows that share a prompt of 200 tokens and have 40 of their own, as in the other parts
of that benchmark. The products are those of a step: each linear layer, the output layer included, with one input per row. The rest of a
step is attention, norms, sampling, and Python. Steps and products alternate in rounds; medians over all steps but the first of a round.
Every other step computes its products in torch's own order (`lightning_core.model.products`), the last column.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.model.compute import choose_path
from lightning_core.model.products import multiply_few_rows
from lightning_core.model.source import load_model

ROWS = (1, 8, 64)
PREFIX, QUESTION, NEW, ROUNDS = 200, 40, 24, 4


def compare_decode(folder: Path | str, name: str) -> None:
    """Print the time of a step and of its products for several numbers of rows, in float32."""
    torch.set_float32_matmul_precision("highest")
    model: Any = load_model(folder, torch.float32)
    path = choose_path(model)
    model.requires_grad_(False)
    multiply_few_rows(model)
    backend = TorchBackend(
        {"policy": SampledModel(model=model, path=path)},
        max_context=1024, max_batch=max(ROWS), gather_ms=200, seed=0,
    )  # fmt: skip
    times = _Times(backend._lanes["policy"], model)
    print(f"{name}, float32, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; CPU of a decoding step")
    try:
        for rows in ROWS:
            steps, others, products = list[float](), list[float](), list[float]()
            for number in range(ROUNDS + 1):
                times.begin(rows)
                asyncio.run(_sample(backend, _prompts(rows, number)))
                measured = _products(model, rows)
                if number:  # the first round warms up
                    steps += times.steps[1:]
                    others += times.others[1:]
                    products += measured
            step, other, product = map(statistics.median, (steps, others, products))
            print(
                f"  {rows:3d} rows  step {step * 1000:7.1f} ms   products {product * 1000:7.1f} ms   {product / step:4.0%} of the step   "
                f"torch's order {other * 1000:7.1f} ms   {step / other:5.2f} of it",
                flush=True,
            )
    finally:
        backend.close()


class _Times:
    """The CPU times of the steps in which so many rows run together, and of those in torch's own order."""

    def __init__(self, lane: Any, model: Any) -> None:
        self.steps: list[float] = []
        self.others: list[float] = []
        self._rows = 0
        step = lane.step
        shipped = {module: type(module) for module in model.modules() if isinstance(module, torch.nn.Linear)}
        own = True

        def timed() -> None:
            nonlocal own
            own = not own
            for module, kind in shipped.items():
                module.__class__ = kind if own else torch.nn.Linear
            rows, start = len(lane.rows), time.process_time()
            step()
            if rows == self._rows:
                (self.steps if own else self.others).append(time.process_time() - start)
            for module, kind in shipped.items():
                module.__class__ = kind

        lane.step = timed

    def begin(self, rows: int) -> None:
        self.steps, self.others, self._rows = [], [], rows


def _prompts(rows: int, number: int) -> list[list[int]]:
    drawn = random.Random(f"{rows} {number}")
    prefix = drawn.choices(range(1000, 20000), k=PREFIX)
    return [[*prefix, *drawn.choices(range(1000, 20000), k=QUESTION)] for _ in range(rows)]


async def _sample(backend: TorchBackend, prompts: Sequence[list[int]]) -> None:
    async def one(prompt: list[int]) -> None:
        async for _ in backend.generate(prompt, SamplingParams(max_tokens=NEW), model="policy"):
            pass

    await asyncio.gather(*map(one, prompts))


@torch.no_grad()
def _products(model: Any, rows: int) -> list[float]:
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = [torch.randn(1, rows, layer.in_features) for layer in layers]
    found: list[float] = []
    for _ in range(NEW):
        start = time.process_time()
        for layer, values in zip(layers, inputs, strict=True):
            layer(values)
        found.append(time.process_time() - start)
    return found
