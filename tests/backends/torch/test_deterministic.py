"""With `trainer.deterministic`, a response has the same bits beside any other requests."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.batch_invariant import (
    FixedRows,
    _fixed_rows,
    _limit,
    _same_at_every_place,
    varies,
)
from lightning_core.backends.torch.engine import SampledModel, TorchBackend
from lightning_core.backends.torch.lanes import make_lane
from lightning_core.errors import TrainingError
from lightning_core.model.adapters import Adapters
from lightning_core.model.compute import choose_path, plain_path
from lightning_core.model.source import load_model
from lightning_core.trainers.torch.factory import open_trainer
from tests.model.families import FAMILIES, Family, make_family
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric

Response = tuple[list[int], list[float]]
Work = tuple[str, list[int]]
"""A model and a prompt."""


def prompts() -> list[list[int]]:
    """Prompts of one to three chunks of keys, some with a common beginning, two of them equal."""
    rng = random.Random(0)
    common = rng.choices(range(256), k=130)
    ends = [rng.choices(range(256), k=count) for count in (1, 40, 40, 150)]
    return [[*common, *end] for end in ends] + [common[:5], common[:1], [*common, *ends[1]]]


async def respond(backend: TorchBackend, work: Work, number: int) -> Response:
    """A response, and another one to a prompt that continues it."""
    model, prompt = work
    tokens, logprobs = list[int](), list[float]()
    for turn in range(2):
        params = SamplingParams(max_tokens=6, seed=2 * number + turn)
        async for delta in backend.generate([*prompt, *tokens, *[7] * turn], params, model=model):
            tokens += delta.token_ids
            logprobs += delta.logprobs
    return tokens, logprobs


def sample(backend: TorchBackend, work: Sequence[Work], *, concurrency: int, seed: int) -> list[Response]:
    """The responses in the order of ``work``; ``seed`` shuffles their arrival."""

    async def run() -> list[Response]:
        free = asyncio.Semaphore(concurrency)
        found: dict[int, Response] = {}

        async def one(number: int) -> None:
            async with free:
                found[number] = await respond(backend, work[number], number)

        await asyncio.gather(*map(one, random.Random(seed).sample(range(len(work)), len(work))))
        return [found[number] for number in range(len(work))]

    return asyncio.run(run())


def check(models: Mapping[str, SampledModel], work: Sequence[Work], *, cached_tokens: int = 1000) -> list[Response]:
    backend = TorchBackend(
        models, max_context=512, max_batch=64, gather_ms=2.0, seed=0, cached_tokens=cached_tokens, deterministic=True
    )
    try:
        expected = sample(backend, work, concurrency=1, seed=0)
        for concurrency in (3, 16):
            assert sample(backend, work, concurrency=concurrency, seed=concurrency) == expected
            backend.forget_contexts()
        return expected
    finally:
        backend.close()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("kept", [0, pytest.param(200, marks=pytest.mark.long), 1000])
def test_responses_do_not_depend_on_others_or_on_what_is_cached(tiny_llama: Path, dtype: torch.dtype, kept: int):
    model: Any = load_model(tiny_llama, dtype)
    check(
        {"policy": SampledModel(model=model, path=choose_path(model))},
        [("policy", prompt) for prompt in prompts()],
        cached_tokens=kept,
    )


def test_nor_do_those_of_adapters_and_of_their_base(tiny_qwen2: Path):
    model: Any = load_model(tiny_qwen2, torch.float32)
    adapters = Adapters(model)
    path = choose_path(model)
    for number, name in enumerate(("policy", "other")):
        for key, weight in adapters.add(name, rank=4, alpha=8, targets=None, seed=number).items():
            if key.endswith("lora_B"):
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(number))
    adapters.changed()
    models = {
        name: SampledModel(model=model, path=path, adapters=adapters, adapter=adapter)
        for name, adapter in (("policy", "policy"), ("other", "other"), ("base", None))
    }
    found = check(models, [(name, prompt) for prompt in prompts()[3:5] for name in models])
    assert len({tuple(logprobs) for _, logprobs in found}) == 6


def test_nor_on_the_plain_path(tiny_llama: Path):
    model: Any = load_model(tiny_llama, torch.float32)
    path = plain_path(model, "it is a test", attention="sdpa")
    check({"policy": SampledModel(model=model, path=path)}, [("policy", prompt) for prompt in prompts()[3:]])


def test_nor_do_those_of_experts(tmp_path: Path):
    """A product of an expert has as many rows as tokens of the pass choose it."""
    folder = make_family(FAMILIES["qwen3_moe"], tmp_path)
    tree: Any = load_model(folder, torch.float32)
    with pytest.raises(TrainingError, match=r"trainer.deterministic cannot be kept.*depends on the batch"):
        make_lane(tree, choose_path(tree), deterministic=True)
    trainer = open_trainer(**parts(model=str(folder), dtype="float32", deterministic=True))
    trainer.close()
    assert trainer.model.notes[0] == "Qwen3MoeForCausalLM: plain path (it has experts, with trainer.deterministic)"


def test_a_context_that_is_computed_again_continues_with_the_same_bits(tiny_llama: Path):
    model: Any = load_model(tiny_llama, torch.float32)
    backend = TorchBackend(
        {"policy": SampledModel(model=model, path=choose_path(model))},
        max_context=512, max_batch=8, gather_ms=0, seed=0, deterministic=True,
    )  # fmt: skip

    async def run(forgets: bool) -> list[float]:
        found: list[float] = []
        params = SamplingParams(max_tokens=80, seed=1)
        async for delta in backend.generate(prompts()[0], params, model="policy", stream=True):
            found += delta.logprobs
            if forgets and len(found) % 20 < len(delta.logprobs):
                backend.forget_contexts()
        return found

    try:
        assert asyncio.run(run(True)) == asyncio.run(run(False))
    finally:
        backend.close()


class Products(TorchFunctionMode):
    """Records the number of rows of each product of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = list[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.linear, torch.addmm):
            self.rows.append(len(args[func is torch.addmm]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make", [torch.nn.Linear, lambda inputs, outputs: Conv1D(outputs, inputs)], ids=["linear", "conv1d"]
)
@torch.inference_mode()
def test_a_row_of_a_wide_layer_has_the_same_bits_among_any_number_of_rows(make: Any, dtype: torch.dtype):
    layer = make(576, 1536).to(dtype)
    inputs = torch.randn(150, 576, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = _fixed_rows(lambda rows: _same_at_every_place(layer, rows, torch.Generator().manual_seed(1)))
    products = Products()
    with products, FixedRows(rows):
        expected = layer(inputs)
        assert products.rows == [rows] * math.ceil(150 / rows)
        for number in (0, 1, 2, 31, 32, 33, 64, 100):
            assert torch.equal(layer(inputs[None, :number]), expected[None, :number])
    assert torch.allclose(expected, layer(inputs), rtol=0.02, atol=0.02)


def test_nor_do_those_of_gpt2(tmp_path: Path):
    """Its layers are no `nn.Linear`."""
    family = Family("gpt2", {"n_embd": 96, "n_layer": 2, "n_head": 4})
    model: Any = load_model(make_family(family, tmp_path), torch.float32)
    check(
        {"policy": SampledModel(model=model, path=choose_path(model))}, [("policy", prompt) for prompt in prompts()[3:]]
    )


def test_a_machine_whose_products_always_depend_on_their_rows_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert str(varies("it does")) == (
        "trainer.deterministic cannot be kept on this machine: it does. Remove trainer.deterministic and set rollouts.concurrency: 1"
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(TrainingError, match=r"up to 129 rows, with 2 threads.*trainer.threads: 1"):
        _limit(lambda rows: torch.full((rows, 2), float(rows)), (1, 8, 64, 129, 160))
    assert _limit(lambda rows: torch.full((rows, 2), float(rows > 5)), (1, 4, 5, 6, 7, 8, 64)) == 8
    assert _fixed_rows(lambda rows: rows > 40) == 64
    with pytest.raises(TrainingError, match=r"products of 32, 64, 128 rows.*trainer.threads: 1"):
        _fixed_rows(lambda rows: False)
