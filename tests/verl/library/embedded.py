"""The embedded trainer, and the gradients that it passes to the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_core import Row
from lightning_core.config.algorithm import Algorithm
from lightning_core.trainers.torch.factory import open_trainer
from lightning_core.trainers.torch.packing import pack_rows
from tests.trainers.sections import parts
from tests.verl.library.step import Weights, moved

ALL = 10**6


class Embedded:
    """A `TorchTrainer` whose weights differ from the initial ones."""

    def __init__(self, folder: Path) -> None:
        self._trainer = open_trainer(
            **parts(model=str(folder), dtype="float32", keep_base=True, grad_clip=1e9, threads=1)
        )
        base = {name: master.detach().clone() for name, master in self._trainer.model.tuning.masters.items()}
        now = moved(base, seed=1)
        self.weights = {"base": base, "now": now, "later": moved(now, seed=2)}
        """The initial weights, those at the start of each step, and those after its first update."""
        self._load("now")

    @torch.no_grad()
    def _load(self, name: str) -> None:
        for parameter, master in self._trainer.model.tuning.masters.items():
            master.copy_(self.weights[name][parameter])
        self._trainer.model.tuning.publish()

    @property
    def tokenizer(self) -> Any:
        return self._trainer.model.tokenizer

    def logprobs(self, row: Row) -> Any:
        """The policy's logprobs of the row's sampled tokens."""
        (batch,) = pack_rows([row], [0], budget=ALL)
        with torch.no_grad():
            return self._trainer.model.forward.logprobs(batch, [row])[0].numpy()

    def gradients(self, rows: Sequence[Row], algorithm: Algorithm) -> tuple[Weights, dict[str, float]]:
        """The gradient of a step's last update, by parameter, and the step's metrics."""
        found: Weights = {}

        def take(*_: object) -> None:
            nonlocal found
            found = {n: t.grad.clone() for n, t in self._trainer.model.tuning.masters.items() if t.grad is not None}
            self._load("later")

        self._trainer._updater.algorithm = algorithm
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._trainer._updater.optimizer.adamw, "step", take)
            metrics = self._trainer.step(rows)
        self._load("now")
        return found, dict(metrics)

    def close(self) -> None:
        self._trainer.close()
