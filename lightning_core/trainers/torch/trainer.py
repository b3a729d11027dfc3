"""The embedded trainer: one model, sampled and trained in this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from lightning_core.backends.torch.engine import TorchBackend
from lightning_core.config.algorithm import Algorithm
from lightning_core.config.trainer import TrainerSection
from lightning_core.trainers.micro_batches import OnBatch, ignore_batches
from lightning_core.trainers.torch import checkpoint
from lightning_core.trainers.torch.failed_updates import UndoneUpdates
from lightning_core.trainers.torch.fitting import fits, release_for_sampler
from lightning_core.trainers.torch.policy_model import PolicyModel
from lightning_core.trainers.torch.proof import check_rows, prove_once
from lightning_core.trainers.torch.scorer import RowScorer, open_scorer
from lightning_core.trainers.torch.update import Updater
from lightning_core.transitions import Row


class TorchTrainer:
    """A `Learner` of one policy. It updates the weights between the engine's passes."""

    def __init__(
        self,
        model: PolicyModel,
        backend: TorchBackend,
        algorithm: Algorithm,
        settings: TrainerSection,
        *,
        seed: int,
    ) -> None:
        """``backend``: the engine, which samples ``model`` from now on. Raises `ConfigError` for an algorithm that does not fit."""
        self.model = model
        self.backend = backend
        """See `Trainer.backend`."""
        self._updater = Updater(model, algorithm, settings, seed=seed)
        self._updates = UndoneUpdates(
            model, self._updater, state=self.state, restore=self.restore, release=partial(backend.free_rows, model.name)
        )
        self.version = 0
        """Number of updates; the backend stamps it on each response."""
        self.saved_in: Path | None = None
        """The last checkpoint, whose frozen weights the next one links."""
        self.also_saved: dict[str, checkpoint.Stateful] = {}
        """Further contents of each checkpoint by file name, such as a critic."""
        memory = model.memory
        backend.add(
            model.name, model.sampled, live=True, cached_tokens=memory.cache_tokens, row_bytes=memory.row_bytes or None
        )

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause sampling, with the trained weights active."""
        with self.backend.pause(), self.model.tuning.active():
            yield

    def step(self, rows: Sequence[Row], on_batch: OnBatch = ignore_batches) -> Mapping[str, float]:
        """See `Learner.step`.

        Rows whose advantages are all 0 cost nothing, but count in the means of the loss.
        """
        self.check(rows)
        with self.paused():
            self._make_room(rows)
            metrics = self._updates.step(rows, self.version, on_batch)
            self.version += 1
            self.backend.versions[self.model.name] = self.version
            release_for_sampler(self.model)
        return metrics

    def _make_room(self, rows: Sequence[Row]) -> None:
        """Free what the engine holds for this policy. The memory of its running rows only if the update on ``rows`` needs it."""
        self.backend.forget(self.model.name)
        if not fits(self.model, rows, self._updater.optimizer.bytes_to_allocate):
            self.backend.free_rows(self.model.name)

    def check(self, rows: Sequence[Row]) -> None:
        """Raise `TrainingError` for rows that cannot be trained on."""
        check_rows(rows, max_context=self.backend.max_context)
        prove_once(rows)

    def scorer(self, model: str) -> RowScorer:
        """See `Learner.scorer`."""
        return open_scorer(self.model, model, prepared=self.paused)

    def save(self, folder: Path) -> None:
        """See `Learner.save`."""
        with self.backend.pause():
            checkpoint.write(folder, self.state(), weights=partial(self.model.write, earlier=self.saved_in))
        self.saved_in = folder

    def load(self, folder: Path, *, weights_only: bool = False) -> int:
        """See `Learner.load`."""
        state = checkpoint.read(folder, self.model.fingerprint, also=self.also_saved, weights_only=weights_only)
        with self.backend.pause():
            self.backend.forget(self.model.name)
            self.restore(state)
        self.saved_in = folder
        return self.version

    def save_pretrained(self, folder: Path, *, untied: bool = False) -> None:
        """See `write_merged`."""
        with self.backend.pause():
            self.model.write_merged(folder, untied=untied)

    def close(self) -> None:
        """See `Learner.close`."""
        self.backend.close()

    def state(self) -> checkpoint.Checkpoint:
        """The state that `restore` continues from. Its tensors are the trained ones, not copies."""
        return checkpoint.Checkpoint(
            fingerprint=self.model.fingerprint,
            version=self.version,
            submitted=self.backend.submitted,
            skipped=self._updates.skipped,
            micro_batch_tokens=self._updates.micro_batch_tokens,
            weights=self.model.tuning.masters,
            moments=self._updater.optimizer.moments(),
            also={name: part.state() for name, part in self.also_saved.items()},
        )

    @torch.no_grad()
    def restore(self, state: checkpoint.Checkpoint) -> None:
        """Continue from ``state``.

        Sampling must be paused, and the backend must have forgotten this policy.
        """
        for name, master in self.model.tuning.masters.items():
            master.copy_(state.weights[name])
        self.model.tuning.publish()
        self._updater.optimizer.restore(state.moments)
        for name, tensors in state.also.items():
            self.also_saved[name].restore(tensors)
        self.version = self.backend.versions[self.model.name] = state.version
        self.backend.submitted = state.submitted
        self._updates.restore(skipped=state.skipped, micro_batch_tokens=state.micro_batch_tokens)
