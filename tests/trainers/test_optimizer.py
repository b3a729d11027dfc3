"""Learning rates and weight decay, against computed numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_core.config.trainer import TrainerSection
from lightning_core.errors import ConfigError
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.optimizer import decay_groups, learning_rate_factor
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.trainers.verl.optimizer import AdamW
from tests.trainers.rows import make_row
from tests.trainers.sections import parts

pytestmark = pytest.mark.numeric
EIGHTH = 0.5 * (1 + math.cos(math.pi / 4))  # a quarter of the way down

FACTORS: list[tuple[dict[str, Any], list[float]]] = [
    ({"steps": 3}, [1, 1, 1]),
    ({"steps": 6, "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
    ({"steps": 4, "schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
    ({"steps": 6, "schedule": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.75, 0.5, 0.25]),
    ({"steps": 4, "schedule": "linear", "min_learning_rate_ratio": 0.2}, [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
    ({"steps": 4, "schedule": "cosine"}, [1, EIGHTH, 0.5, 1 - EIGHTH, 0]),
    ({"steps": 4, "schedule": "cosine", "min_learning_rate_ratio": 0.1}, [1, 0.1 + 0.9 * EIGHTH, 0.55]),
    ({"steps": 5, "schedule": "cosine", "warmup_steps": 1}, [1, 1, EIGHTH, 0.5, 1 - EIGHTH]),
]


@pytest.mark.parametrize(("settings", "expected"), FACTORS, ids=[str(settings) for settings, _ in FACTORS])
def test_the_learning_rate_of_each_step(settings: dict[str, Any], expected: list[float]) -> None:
    section = TrainerSection(**settings)
    assert [learning_rate_factor(section, step) for step in range(len(expected))] == pytest.approx(expected)


def named() -> dict[str, torch.nn.Parameter]:
    return {
        "layer.weight": torch.nn.Parameter(torch.ones(2, 3)),
        "norm.weight": torch.nn.Parameter(torch.ones(3)),
        "layer.bias": torch.nn.Parameter(torch.ones(2)),
        "experts.down_proj_bias": torch.nn.Parameter(torch.ones(4, 2)),
    }


def test_matrices_are_decayed_but_not_norms_and_biases() -> None:
    """AdamW with a gradient of 0 only decays: 1 − learning rate · decay = 0.95."""
    parameters = named()
    optimizer = torch.optim.AdamW(decay_groups(parameters.items(), 0.5), lr=0.1)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = {name: float(parameter.detach().flatten()[0]) for name, parameter in parameters.items()}
    assert found == pytest.approx(
        {"layer.weight": 0.95, "norm.weight": 1, "layer.bias": 1, "experts.down_proj_bias": 1}
    )


def test_verl_decays_the_same_weights_unless_fsdp_has_flattened_them() -> None:
    """verl passes a generator of parameters, and these keyword arguments."""
    parameters = list(named().values())[:3]
    optimizer = AdamW((p for p in parameters), lr=0.1, weight_decay=0.5, betas=(0.9, 0.999))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert [float(parameter.detach().flatten()[0]) for parameter in parameters] == pytest.approx([0.95, 1, 1])
    with pytest.raises(ConfigError, match="FSDP has flattened the weights"):
        AdamW(iter([torch.nn.Parameter(torch.ones(9))]), lr=0.1, weight_decay=0.5, betas=(0.9, 0.999))


Make = Callable[..., TorchTrainer]


@pytest.fixture
def make(tiny_qwen2: Path, trainers: list[TorchTrainer]) -> Make:
    def made(**options: object) -> TorchTrainer:
        defaults: dict[str, object] = {"model": str(tiny_qwen2), "dtype": "float32", "learning_rate": 1e-3, "steps": 4}
        trainers.append(open_trainer(**parts(**{**defaults, **options})))
        return trainers[-1]

    return made


def masters(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.state().weights.items()}


def test_decay_moves_the_matrices_of_a_model_alone(make: Make) -> None:
    """One step with and without decay differs by learning rate · decay · weight in matrices, and nowhere else."""
    rows = [make_row(([1, 2, 3], False), ([4, 5], True))]
    plain, decayed = make(), make(weight_decay=0.1)
    before = masters(plain)
    plain.step(rows)
    decayed.step(rows)
    without, found = masters(plain), masters(decayed)
    for name, weight in before.items():
        expected = without[name] - (1e-3 * 0.1 * weight if weight.ndim == 2 else 0.0)
        torch.testing.assert_close(found[name], expected, atol=1e-7, rtol=0)
    assert {weight.ndim for weight in before.values()} == {1, 2}


def test_a_resumed_trainer_continues_the_schedule(make: Make, tmp_path: Path) -> None:
    rows = [make_row(([1, 2, 3], False), ([4, 5], True))]
    trainer = make(schedule="cosine", warmup_steps=1, steps=5)
    rates = [trainer.step(rows)["learning_rate"] for _ in range(2)]
    trainer.save(tmp_path / "checkpoint")
    resumed = make(schedule="cosine", warmup_steps=1, steps=5)
    resumed.load(tmp_path / "checkpoint")
    rates += [resumed.step(rows)["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3 * EIGHTH, 0.5e-3, 1e-3 * (1 - EIGHTH)])
