"""The tiny models, created once for all trainer tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.tiny_model import make_tiny_model


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """A test starts and ends with float32 products, for any models that it loads."""
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), arch="llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen2"), arch="qwen2", layers=3)


@pytest.fixture(params=["llama", "qwen2"])
def tiny_model(request: pytest.FixtureRequest, tiny_llama: Path, tiny_qwen2: Path) -> Path:
    return tiny_llama if request.param == "llama" else tiny_qwen2


@pytest.fixture
def trainers() -> Iterator[list[TorchTrainer]]:
    """A list of trainers that are closed after the test."""
    made: list[TorchTrainer] = []
    yield made
    for trainer in made:
        trainer.close()
