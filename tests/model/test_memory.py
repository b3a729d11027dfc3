"""The sampler's cache and the micro-batches are sized from the free memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_core.errors import ConfigError
from lightning_core.model.adapters import Adapters
from lightning_core.model.compute import choose_path
from lightning_core.model.load import context_limit
from lightning_core.model.memory import cached_bytes, plan, trained_bytes
from lightning_core.model.recompute import recompute_layers
from lightning_core.model.source import load_model
from lightning_core.rollouts.hardware import total_memory
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.machine import free_memory
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "configured", "expected"),
    [
        # 8 GiB: 2 for gradients and moments; a quarter of 6 for the cache; a third of 4.5 for running rows, which keep two thirds of it
        # and copy in the rest; a third of 4.5 for a pass.
        (8 * GIB, {}, (int(1.5 * GIB) // 45_000, GIB // 45_000, 1536)),
        (24 * GIB, {}, (int(5.5 * GIB) // 45_000, 11 * GIB // 3 // 45_000, 4096)),
        (GIB, {}, (0, 4096, 256)),
        (8 * GIB, {"cache_bytes": 3 * GIB}, (3 * GIB // 45_000, 2 * GIB // 3 // 45_000, 1024)),
        (8 * GIB, {"micro_batch_tokens": 99}, (int(1.5 * GIB) // 45_000, GIB // 45_000, 99)),
    ],
)
def test_memory_is_divided(free: int, configured: dict[str, int], expected: tuple[int, int, int]) -> None:
    settings = {"cache_bytes": None, "micro_batch_tokens": None, **configured}
    found = plan(free, weights=2 * GIB, cached=45_000, trained=2**20, **settings)
    assert (found.cache_tokens, found.row_tokens, found.micro_batch_tokens) == expected


def test_a_long_row_may_use_the_memory_of_the_cache_before_its_layers_are_recomputed() -> None:
    settings = {"weights": 2 * GIB, "cached": 45_000, "trained": 2**20, "cache_bytes": None, "micro_batch_tokens": None}
    assert plan(8 * GIB, **settings).most_tokens == 2 * 1536
    assert plan(GIB, **settings).most_tokens == 256


def test_a_cache_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.cache_gb: a cache of 7\.0 GB .* 6\.0 GB of memory are free"):
        plan(8 * GIB, weights=2 * GIB, cached=45_000, trained=2**20, cache_bytes=7 * GIB, micro_batch_tokens=None)


def test_a_model_without_a_prefix_cache_gets_none() -> None:
    found = plan(GIB, weights=0, cached=0, trained=2**20, cache_bytes=GIB, micro_batch_tokens=None)
    assert (found.cache_tokens, found.row_bytes, found.micro_batch_tokens) == (0, 0, 341)  # a third of all that is free


def test_what_a_token_keeps_is_measured(tiny_llama: Path) -> None:
    model = load_model(tiny_llama, torch.float32)
    path = choose_path(model)
    assert path.geometry is not None
    assert cached_bytes(path.geometry, torch.float32) == 2 * 2 * 2 * 16 * 4
    everything = trained_bytes(model, path, (), entropy=False)
    # Each of the two layers keeps at least its input, queries, keys, values and three tensors of the feed-forward part.
    assert everything > 2 * 4 * (64 + 64 + 32 + 32 + 3 * 128)
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    assert trained_bytes(model, path, (), entropy=False) < 0.6 * everything
    model.requires_grad_(True)
    recompute_layers(model)
    assert trained_bytes(model, path, (), entropy=False) < 0.3 * everything
    with_entropy = trained_bytes(model, path, (), entropy=True)
    assert with_entropy - trained_bytes(model, path, (), entropy=False) == 2 * 4 * 259


def test_adapters_are_weights_and_no_activations(tiny_llama: Path) -> None:
    model = load_model(tiny_llama, torch.float32)
    path = choose_path(model)
    model.requires_grad_(False)
    adapters = Adapters(model)
    weights = adapters.add("a", rank=16, alpha=1.0, targets=None, seed=0).values()
    with adapters.use("a"):
        found, too_much = (trained_bytes(model, path, own, entropy=False) for own in (weights, ()))
    # The first layer's gradient does not need all of its matrices.
    assert 0.8 < (too_much - found) * 64 / sum(weight.nbytes for weight in weights) <= 1


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, 64),
        ({"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 32}}, 32),
    ],
)
def test_a_context_ends_where_long_sequences_would_change_short_ones(rope: dict[str, object], expected: int) -> None:
    config = SimpleNamespace(max_position_embeddings=4096, rope_parameters=rope)
    assert context_limit(config, 10) == expected
    assert context_limit(SimpleNamespace(), 10) == 10


def test_free_memory_is_less_than_the_machine_has() -> None:
    assert 2**28 < free_memory(torch.device("cpu")) < total_memory()


def test_configured_sizes_are_used(tiny_llama: Path) -> None:
    trainer = open_trainer(**parts(model=str(tiny_llama), micro_batch_tokens=8, cache_gb=2**-10))
    try:
        rows = [make_row(([number, 2, 3, 4, 5], False), ([6, 7], True)) for number in range(3)]
        assert trainer.step(rows)["micro_batches"] == 3
        assert trainer.model.memory.cache_tokens == 2**20 // (2 * 2 * 2 * 16 * 4)
    finally:
        trainer.close()


def test_the_initial_weights_share_the_cache(tiny_llama: Path) -> None:
    trainer = open_trainer(**parts(model=str(tiny_llama), cache_gb=2**-10, keep_base=True))
    try:
        assert trainer.model.memory.cache_tokens == 2**19 // (2 * 2 * 2 * 16 * 4)
        lanes, memory = trainer.backend._each_lane(), trainer.model.memory
        assert [lane._pool.capacity for lane in lanes] == [memory.cache_tokens] * 2
        assert [lane._row_bytes for lane in lanes] == [memory.row_bytes] * 2
    finally:
        trainer.close()


def test_another_sampler_needs_no_cache(tiny_llama: Path) -> None:
    trainer = open_trainer(**parts(model=str(tiny_llama)), samples=False)
    try:
        assert trainer.model.notes[-1].startswith("memory: no prefix cache")
    finally:
        trainer.close()
