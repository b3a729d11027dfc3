"""The precision of weights, and float32 training of bfloat16 weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_core.model.head import linear_logprobs
from lightning_core.model.precision import bfloat16_unit, choose_dtype, set_product_precision
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.trainers.test_torch_trainer import gradients, make, sampled_rows, weights

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(
    ("name", "supported", "expected"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float32),
        ("float32", True, torch.float32),
        ("bfloat16", False, torch.bfloat16),
    ],
)
def test_a_gpu_has_bfloat16_weights_where_it_can(
    monkeypatch: pytest.MonkeyPatch, name: str, supported: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert choose_dtype(name, torch.device("cuda")) == expected


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "onednn", "expected"),
    [
        (True, True, True, "AMX"),
        (False, True, True, "AVX512_BF16"),
        (False, False, True, None),
        (True, True, False, None),
    ],
)
def test_a_cpu_has_float32_weights_and_bfloat16_products_where_it_can(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx512_bf16: bool, onednn: bool, expected: str | None
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert bfloat16_unit() == expected
    assert choose_dtype("auto", cpu) == torch.float32
    set_product_precision("auto", cpu)
    assert torch.get_float32_matmul_precision() == ("medium" if expected else "highest")
    set_product_precision("float32", cpu)
    assert torch.get_float32_matmul_precision() == "highest", "exact, also after another model of this process"


@pytest.mark.parametrize(("name", "tolerance"), [("auto", 0.03), ("float32", 1e-5)])
def test_the_products_that_this_cpu_makes_are_near_the_exact_ones(name: str, tolerance: float) -> None:
    """Through the head, with the largest product. bfloat16 keeps 8 bits: the error of an input is at most 1/512 of it."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 576, generator=generator) / 24, torch.randn(4096, 576, generator=generator)
    places = torch.arange(64)
    expected = (hidden.double() @ weight.double().t()).log_softmax(-1)[places, places]
    set_product_precision(name, torch.device("cpu"))
    found = linear_logprobs(hidden, weight, None, torch.ones(64), places, places)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


def test_bfloat16_weights_are_trained_in_float32(tiny_llama: Path, trainers: list[TorchTrainer]) -> None:
    """Steps much smaller than the weights' rounding accumulate."""
    trainer = make(trainers, tiny_llama, dtype="bfloat16", learning_rate=1e-6)
    rows = sampled_rows(trainer)
    before = weights(trainer)
    trainer.step(rows)
    after = weights(trainer)
    assert {p.dtype for p in trainer.model.network.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert {moment.dtype for state in trainer._updater.optimizer.adamw.state.values() for moment in state.values()} == {
        torch.float32
    }
    for name, weight in after.items():
        assert (weight != before[name]).any()
        assert torch.equal(weight.bfloat16(), dict(trainer.model.network.named_parameters())[name])


def test_micro_batches_of_bfloat16_weights_add_up_in_float32(tiny_llama: Path, trainers: list[TorchTrainer]) -> None:
    exact = make(trainers, tiny_llama, grad_clip=1e9)
    rows = sampled_rows(exact)
    expected = gradients(exact, rows)
    for budget in (1, 4096):
        trainer = make(trainers, tiny_llama, dtype="bfloat16", grad_clip=1e9, micro_batch_tokens=budget)
        found = gradients(trainer, rows)
        assert {grad.dtype for grad in found.values()} == {torch.float32}
        apart = sum(float((found[name] - grad).square().sum()) for name, grad in expected.items())
        assert apart < 0.05**2 * sum(float(grad.square().sum()) for grad in expected.values())
