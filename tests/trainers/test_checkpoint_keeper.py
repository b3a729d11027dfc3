"""A run that ends early saves the weights of its recorded steps, and no others."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_core import Row, load_config
from lightning_core.errors import InfrastructureError, TrainingError
from lightning_core.records.store import Store
from lightning_core.rollouts.interrupts import Interrupted, interruptible
from lightning_core.trainers.checkpoint_keeper import CheckpointKeeper
from lightning_core.trainers.micro_batches import OnBatch, ignore_batches
from tests.baselines.wiring import HashLearner
from tests.loop.test_endings import default_handlers


@dataclass
class Failing(HashLearner):
    """Its second step raises ``error``; it gets SIGTERM while it saves, if ``signalled``."""

    error: Exception | None = None
    signalled: bool = False

    def step(self, rows: Sequence[Row], on_batch: OnBatch = ignore_batches) -> Mapping[str, float]:
        if self.steps and self.error is not None:
            raise self.error
        return super().step(rows, on_batch)

    def save(self, folder: Path) -> None:
        if self.signalled:
            signal.raise_signal(signal.SIGTERM)
        super().save(folder)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store.db") as opened:
        yield opened


def saved(folder: Path, store: Store, **options: Any) -> list[str]:
    """Make a step and record it, and another one; the names of the checkpoints."""
    config = load_config({"policy": {"model": "m"}})
    learner = Failing(config, **options)
    keeper = CheckpointKeeper(learner, config.trainer, folder, store, step=0)
    with keeper.saving_progress(lambda: 1):
        keeper.update([])
        keeper.recorded()
        keeper.update([])
    return [path.name for path in (folder / "checkpoints").iterdir()]


@pytest.mark.parametrize("error", [TrainingError("x"), RuntimeError("a bug"), MemoryError()], ids=repr)
def test_weights_of_recorded_steps_are_saved_after_an_update_that_fails(
    tmp_path: Path, store: Store, error: Exception
) -> None:
    with pytest.raises(type(error)):
        saved(tmp_path, store, error=error)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_weights_that_the_sampler_did_not_get_are_not_saved(tmp_path: Path, store: Store) -> None:
    with pytest.raises(InfrastructureError):
        saved(tmp_path, store, error=InfrastructureError("the server is gone"))
    assert not (tmp_path / "checkpoints").exists()


def test_a_signal_does_not_interrupt_the_save(tmp_path: Path, store: Store) -> None:
    with default_handlers(), pytest.raises(Interrupted), interruptible():
        saved(tmp_path, store, error=RuntimeError("a bug"), signalled=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
