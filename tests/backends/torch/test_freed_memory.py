"""The memory plan holds only if freed memory can be used for something else.

Tensors in reference cycles wait for the garbage collector, often for minutes. The C library keeps what a thread has freed for that thread.
"""

from __future__ import annotations

import asyncio
import gc
import platform
import random
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.config.algorithm import Algorithm, Kl
from lightning_core.model.compute import choose_path, plain_path
from lightning_core.model.source import load_model
from lightning_core.trainers.torch import machine
from lightning_core.trainers.torch.factory import open_trainer
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric


@contextmanager
def no_collection() -> Generator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tensors_in_cycles() -> list[str]:
    """The shapes of the tensors that only the garbage collector frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [str(list(item.shape)) for item in gc.garbage if isinstance(item, torch.Tensor)]
    gc.garbage.clear()
    return found


def sample(engine: TorchBackend) -> None:
    """Sample responses to prompts with a common start; some are left before their end."""

    async def one(number: int) -> None:
        prompt = random.Random(0).choices(range(256), k=100) + random.Random(number).choices(range(256), k=40)
        response = engine.generate(prompt, SamplingParams(max_tokens=12, seed=number), model="policy", stream=True)
        async for delta in response:
            if number % 4 == 0 and delta.token_ids:
                break
        await response.aclose()

    async def run() -> None:
        await asyncio.gather(*map(one, range(12)))

    asyncio.run(run())


@pytest.mark.parametrize("plain", [False, True], ids=["tree", "plain"])
def test_contexts_are_freed_when_they_are_evicted_or_forgotten(tiny_llama: Path, plain: bool) -> None:
    network: Any = load_model(tiny_llama, torch.float32)
    path = plain_path(network, "it is a test", attention="sdpa") if plain else choose_path(network)
    engine = TorchBackend(
        {"policy": SampledModel(model=network, path=path)},
        max_context=512, max_batch=64, gather_ms=20.0, seed=0, cached_tokens=300, row_bytes=500 * 512,
    )  # fmt: skip
    with closing(engine), no_collection():
        sample(engine)
        sample(engine)
        assert not tensors_in_cycles(), "evicted"
        engine.forget_contexts()
        assert not tensors_in_cycles(), "forgotten"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"tuning": "lora", "algorithm": Algorithm(kl=Kl(weight=0.1), entropy_weight=0.01)},
    ],
    ids=["all weights", "recomputed", "lora, KL divergence and entropy"],
)
def test_a_step_leaves_no_tensor_behind(tiny_llama: Path, options: dict[str, Any]) -> None:
    trainer = open_trainer(**parts(model=str(tiny_llama), **options))
    rows = [make_row((range(9), False), (range(9, 40), True), rollout=str(number)) for number in range(4)]
    with closing(trainer), no_collection():
        sample(trainer.backend)
        trainer.step(rows)
        assert not tensors_in_cycles()


def freed_between(kept: list[Tensor]) -> None:
    """Free 300 MB in blocks between those that are added to ``kept``, so that the heap cannot shrink by itself."""
    blocks = [torch.ones(100 * 256) for _ in range(3000)]
    kept += blocks[::30]


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library has no malloc_trim")
@pytest.mark.parametrize("free", [0, 1 << 50], ids=["short", "enough"])
def test_a_step_returns_freed_memory_to_the_system_where_it_is_short(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    rows = [make_row((range(9), False), (range(9, 40), True))]
    kept: list[Tensor] = []
    with closing(open_trainer(**parts(model=str(tiny_llama)))) as trainer:
        monkeypatch.setattr(machine, "available_memory", lambda: free)
        freed_between(kept)
        before = resident()
        trainer.step(rows)
        assert (before - resident() > 200 << 20) == (free == 0)
