"""The memory plan holds only if freed memory can be used for something else.

Tensors in reference cycles wait for the garbage collector, often for minutes. The C library keeps what a thread has freed for that thread.
"""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import random
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace
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
from tests.trainers.test_failed_updates import Full

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


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("plain", [False, True], ids=["tree", "plain"])
def test_contexts_are_freed_when_they_are_evicted_or_forgotten(
    tiny_llama: Path, plain: bool, deterministic: bool
) -> None:
    network: Any = load_model(tiny_llama, torch.float32)
    path = plain_path(network, "it is a test", attention="sdpa") if plain else choose_path(network)
    engine = TorchBackend(
        {"policy": SampledModel(model=network, path=path)},
        max_context=512, max_batch=64, gather_ms=20.0, seed=0, cached_tokens=300, row_bytes=500 * 512,
        deterministic=deterministic,
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


def fragment_heap() -> list[Tensor]:
    """Free 300 MB in blocks between others, which are returned, so that the heap cannot shrink by itself."""
    blocks = [torch.ones(100 * 256) for _ in range(3000)]
    return blocks[::30]


def set_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    for name in ("available_memory", "free_physical_memory"):
        monkeypatch.setattr(machine, name, lambda: free)


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or any(name == "LD_PRELOAD" or "MALLOC_" in name for name in os.environ),
    reason="another allocator, or other settings of it",
)
def test_freed_memory_is_released_where_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, found = torch.device("cpu"), list[int]()
    kept = fragment_heap()
    before = resident()
    for free in (1 << 50, 0):
        set_free(monkeypatch, free)
        machine.release_freed_memory(cpu, needed=1 << 30)
        found.append((before - resident()) >> 20)
    assert found[0] < 50 < 200 < found[1]
    assert kept


@pytest.mark.parametrize(("what", "others", "times"), [("pass", 1, 2), ("moments", 3, 1), ("sampler", 4, 1)])
def test_a_step_releases_memory_before_it_is_needed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, what: str, others: int, times: int
) -> None:
    """Before the update as a whole, its two passes, the first moments, and before sampling goes on, which need less and less here."""
    rows = [make_row(([number] * 9, False), (range(9, 40), True), rollout=str(number)) for number in range(2)]
    released: list[int] = []
    for missing in (0, 1):
        with closing(open_trainer(**parts(model=str(tiny_llama), micro_batch_tokens=40))) as trainer:
            model = trainer.model
            model.memory = replace(model.memory, trained_token_bytes=1 << 30, most_tokens=30)
            model.sampler_bytes = 1000
            moments = 2 * sum(master.nbytes for master in model.tuning.masters.values())
            needed = {"pass": 2 * 30 << 30, "moments": moments, "sampler": 1000}[what]
            set_free(monkeypatch, needed - missing)
            monkeypatch.setattr(machine, "malloc_trim", lambda: released.append)
            trainer.step(rows)
        assert len(released) == others + missing * times
        released.clear()


def test_the_memory_of_running_responses_is_kept_for_the_next_ones_unless_it_is_short(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [make_row((range(9), False), (range(9, 40), True))]
    with closing(open_trainer(**parts(model=str(tiny_llama)))) as trainer:
        lane: Any = trainer.backend._lanes["policy"]
        # Moments exist after the first step.
        needed = 2 * 40 * trainer.model.memory.trained_token_bytes + sum(
            master.nbytes for master in trainer.model.tuning.masters.values()
        )
        for free, kept in ((1 << 50, True), (needed - 1, False), (needed, True)):
            set_free(monkeypatch, free)
            sample(trainer.backend)
            trainer.step(rows)
            assert (lane.held_bytes > 0) == kept


def test_an_update_that_does_not_fit_is_repeated_without_the_memory_of_running_responses(tiny_llama: Path) -> None:
    rows = [make_row((range(9), False), (range(9, 40), True), rollout=str(number)) for number in range(2)]
    with closing(open_trainer(**parts(model=str(tiny_llama)))) as trainer:
        sample(trainer.backend)
        before, lane = trainer.model.memory, trainer.backend._lanes["policy"]
        assert lane.held_bytes > 0
        with Full(torch.ops.aten.mm.default):
            assert trainer.step(rows)["updates_repeated"] == 1
        assert (lane.held_bytes, trainer.model.memory) == (0, before), "micro-batches are as large as before"
