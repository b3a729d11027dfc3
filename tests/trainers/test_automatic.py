"""The settings that a run chooses itself: learning rate and trained layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_core.trainers.learning_rate import learning_rate
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.trainers.sections import parts


@pytest.mark.parametrize(
    ("weights", "full"),
    [(1_000_000, 2e-5), (135_000_000, 2e-5), (494_000_000, 5.47e-6), (1_540_000_000, 1.75e-6), (70_000_000_000, 1e-6)],
)
def test_larger_models_get_smaller_learning_rates_and_adapters_larger_ones(weights: int, full: float) -> None:
    assert learning_rate("auto", weights, "full") == pytest.approx(full, rel=0.03)
    assert learning_rate("auto", weights, "lora") == 1e-4
    assert learning_rate(2e-3, weights, "lora") == 2e-3


def opened(folder: Path, **options: object) -> TorchTrainer:
    trainer = open_trainer(**parts(model=str(folder), dtype="float32", device="cpu", **options))
    trainer.close()
    return trainer


def test_on_a_cpu_half_of_the_layers_are_trained_and_the_run_says_so(tiny_llama: Path) -> None:
    trainer = opened(tiny_llama, train_layers="auto", learning_rate="auto")
    layers = trainer.model.network.config.num_hidden_layers
    trained = {name.split(".")[2] for name in trainer.model.tuning.parameters if ".layers." in name}
    assert trained == {str(layer) for layer in range(layers // 2, layers)}
    assert trainer.model.tuning.layers == (layers + 1) // 2
    assert not [name for name in trainer.model.tuning.parameters if "embed" in name]
    notes = "\n".join(trainer.model.notes)
    assert "auto: trainer.learning_rate is 2e-05 for " in notes
    assert f"policy.train_layers is the top {(layers + 1) // 2} layers on cpu" in notes
    assert trainer.model.learning_rate == 2e-5


def test_null_trains_all_weights_and_given_values_need_no_note(tiny_llama: Path) -> None:
    trainer = opened(tiny_llama, learning_rate=1e-3)
    assert {"embed" in name for name in trainer.model.tuning.parameters} == {True, False}
    assert "auto" not in "\n".join(trainer.model.notes)
