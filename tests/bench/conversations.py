"""Prompt tokens that are computed for conversations of which the sampler's cache holds a part, and how long requests wait to start.

``python -m tests.bench.engine --conversations`` prints it for the order in which requests start, and for the order of arrival. The model is
tiny: only tokens and decoding steps are counted.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.backends.torch.waiting_order import WaitingOrder
from lightning_core.model.compute import choose_path
from lightning_core.model.memory import cached_bytes
from lightning_core.model.source import load_model
from tests.tiny_model import make_tiny_model

COUNT, TURNS, TURN, NEW = 48, 6, 60, 4
RUNNING = 3
"""Conversations whose responses run together."""


def compare_orders() -> None:
    """Print the tokens and the steps for caches of several sizes."""
    with tempfile.TemporaryDirectory() as folder:
        model: Any = load_model(make_tiny_model(Path(folder) / "model", arch="llama"), torch.float32)
    path = choose_path(model)
    assert path.geometry is not None
    room = RUNNING * TURNS * TURN * cached_bytes(path.geometry, torch.float32) * 3 // 2
    print(f"{COUNT} conversations of {TURNS} turns, {TURN} tokens each: {COUNT * TURNS * TURN:,} tokens")
    for part in (2, 4):
        for name, arrival in (("in order of arrival", True), ("as shipped", False)):
            with _in_order_of_arrival(arrival):
                backend = TorchBackend(
                    {"policy": SampledModel(model=model, path=path)}, max_context=2048, max_batch=64, gather_ms=50, seed=0,
                    row_bytes=room, cached_tokens=COUNT * TURNS * TURN // part,
                )  # fmt: skip
                waits = _Waits(backend)
                asyncio.run(_converse(backend))
                backend.close()
            print(
                f"  cache for 1/{part}, {name:20s} computed {waits.lane.prompt_tokens_computed:7,d}   steps {waits.lane.decode_steps:4d}"
                f"   wait to start, in steps: mean {sum(waits.steps) / len(waits.steps):5.1f}, most {max(waits.steps):4d}",
                flush=True,
            )


class _Waits:
    """The number of steps between each request and its first one."""

    def __init__(self, backend: TorchBackend) -> None:
        self.lane: Any = backend._lanes["policy"]
        self.steps: list[int] = []
        came: dict[int, int] = {}
        submit, step = backend._submit, self.lane.step

        def submitted(request: Any) -> None:
            submit(request)
            came[request.number] = self.lane.decode_steps

        def stepped() -> None:
            self.steps += [self.lane.decode_steps - came[row.number] for row in self.lane.rows if not row.tokens]
            step()

        backend._submit, self.lane.step = submitted, stepped  # type: ignore[method-assign]


async def _converse(backend: TorchBackend) -> None:
    async def one(number: int) -> None:
        drawn, prompt = random.Random(number), list[int]()
        for _ in range(TURNS):
            prompt += drawn.choices(range(256), k=TURN)
            params = SamplingParams(max_tokens=NEW, seed=number)
            prompt += [
                token async for delta in backend.generate(prompt, params, model="policy") for token in delta.token_ids
            ]

    await asyncio.gather(*map(one, range(COUNT)))


@contextmanager
def _in_order_of_arrival(yes: bool) -> Iterator[None]:
    arrange = WaitingOrder.arrange
    if yes:
        WaitingOrder.arrange = lambda *arguments: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        WaitingOrder.arrange = arrange  # type: ignore[method-assign]
