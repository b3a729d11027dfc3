"""Fixtures for tests of verl's actor: the tiny model, one step, and both trainers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_core import Row
from tests.tiny_model import make_tiny_model
from tests.verl.library import process  # noqa: F401  before anything that imports verl
from tests.verl.library.embedded import Embedded
from tests.verl.library.step import make_rows
from tests.verl.library.trainer import VerlTrainer, join


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases and an untied output layer."""
    return make_tiny_model(tmp_path_factory.mktemp("qwen2"), arch="qwen2")


@pytest.fixture(scope="session")
def embedded(folder: Path) -> Iterator[Embedded]:
    trainer = Embedded(folder)
    yield trainer
    trainer.close()


@pytest.fixture(scope="session")
def rows(embedded: Embedded) -> list[Row]:
    return make_rows(embedded.logprobs)


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with join(rank=0, ranks=1, meeting=tmp_path_factory.mktemp("ranks") / "meeting"):
        yield


@pytest.fixture(scope="session")
def verl_trainer(one_rank: None, folder: Path, embedded: Embedded) -> VerlTrainer:
    return VerlTrainer(folder, embedded.weights)
