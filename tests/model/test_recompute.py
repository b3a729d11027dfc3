"""Gradient checkpointing: the same gradients with less memory, and no effect on sampling."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_core.backends.backend import SamplingParams
from lightning_core.errors import TrainingError
from lightning_core.model.recompute import recompute_layers
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.tiny_model import make_tiny_model
from tests.trainers.test_torch_trainer import gradients, make, sample, sampled_rows

pytestmark = pytest.mark.numeric


LORA = {"tuning": "lora", "lora_rank": 4}


@pytest.mark.parametrize(
    ("tiny_model", "options"),
    [
        ("llama", {}),
        ("llama", LORA),
        ("qwen2", {"train_layers": 1}),
        pytest.param("llama", {"train_layers": 1}, marks=pytest.mark.long),
        pytest.param("qwen2", {}, marks=pytest.mark.long),
        pytest.param("qwen2", LORA, marks=pytest.mark.long),
    ],
    indirect=["tiny_model"],
    ids=str,
)
def test_gradients_and_samples_are_the_same(
    tiny_model: Path, trainers: list[TorchTrainer], options: dict[str, Any]
) -> None:
    usual = make(trainers, tiny_model, grad_clip=1e9, **options)
    frugal = make(trainers, tiny_model, grad_clip=1e9, gradient_checkpointing=True, **options)
    rows = sampled_rows(usual)
    assert [row.token_ids.tolist() for row in sampled_rows(frugal)] == [row.token_ids.tolist() for row in rows]
    expected, found = gradients(usual, rows), gradients(frugal, rows)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-7, rtol=1e-5)


def kept_bytes(trainer: TorchTrainer) -> int:
    """The most that a step stores at any time for its backward pass, without weights."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in trainer.model.network.state_dict().values()}
    users = Counter[int]()
    live = most = 0

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal live, most
            self.tensor = tensor
            self.pointer = tensor.untyped_storage().data_ptr()
            self.size = 0 if self.pointer in weights else tensor.untyped_storage().nbytes()
            live += 0 if users[self.pointer] else self.size
            users[self.pointer] += 1
            most = max(most, live)

        def __del__(self) -> None:
            nonlocal live
            users[self.pointer] -= 1
            live -= 0 if users[self.pointer] else self.size

    rows = sampled_rows(trainer)
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        gradients(trainer, rows)
    return most


def test_less_is_kept(tmp_path: Path, trainers: list[TorchTrainer]) -> None:
    model = make_tiny_model(tmp_path, layers=8)  # so that layers dominate
    usual = make(trainers, model)
    frugal = make(trainers, model, gradient_checkpointing=True)
    assert kept_bytes(frugal) < kept_bytes(usual) / 3


def test_a_pass_that_does_not_fit_the_memory_keeps_less_and_has_the_same_gradients(
    tmp_path: Path, trainers: list[TorchTrainer]
) -> None:
    model = make_tiny_model(tmp_path, layers=8)
    usual, short = (make(trainers, model, grad_clip=1e9) for _ in range(2))
    short.model.memory = replace(short.model.memory, most_tokens=8)
    rows = sampled_rows(usual)
    expected, found = gradients(usual, rows), gradients(short, rows)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-7, rtol=1e-5)
    assert kept_bytes(short) < kept_bytes(usual) / 3
    short.model.memory = usual.model.memory
    assert kept_bytes(short) > kept_bytes(usual) / 3


def test_dropout_stays_off_and_sampling_as_it_was() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        attention_dropout=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        before = model(tokens).logits
    recompute_layers(model)
    torch.testing.assert_close(model(tokens).logits, before, atol=1e-6, rtol=0)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, before, atol=1e-6, rtol=0)
    assert not any(module.training for module in model.modules())


def test_lora_is_merged_and_sampled_as_usual(tiny_llama: Path, trainers: list[TorchTrainer], tmp_path: Path) -> None:
    trainer = make(trainers, tiny_llama, tuning="lora", gradient_checkpointing=True)
    trainer.step(sampled_rows(trainer))
    trainer.save_pretrained(tmp_path / "merged")
    again = make(trainers, tmp_path / "merged")
    greedy = SamplingParams(max_tokens=8, temperature=0)
    (found,), (expected,) = sample(again, [[1, 2, 3]], greedy), sample(trainer, [[1, 2, 3]], greedy)
    assert found.token_ids == expected.token_ids


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(TrainingError, match="gradient_checkpointing: Linear has no layers"):
        recompute_layers(torch.nn.Linear(1, 1))
