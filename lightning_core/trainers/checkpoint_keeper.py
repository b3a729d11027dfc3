"""Decides when a run's weights are saved, and which checkpoints it keeps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_core.config.trainer import TrainerSection
from lightning_core.errors import InfrastructureError, describe
from lightning_core.records.results import held_out_rewards
from lightning_core.records.run_folder.checkpoints import best_checkpoint, checkpoint_step, delete_old, mark_best
from lightning_core.records.store import Store
from lightning_core.rollouts.interrupts import Interrupted, uninterrupted
from lightning_core.trainers import Learner
from lightning_core.trainers.micro_batches import OnBatch, ignore_batches
from lightning_core.transitions import Row

logger = logging.getLogger(__name__)


class CheckpointKeeper:
    """Saves the weights of ``learner`` to the run in ``folder``. ``step``: always the number of its updates."""

    def __init__(self, learner: Learner, settings: TrainerSection, folder: Path, store: Store, *, step: int) -> None:
        """``step``: the newest checkpoint has that many updates."""
        self._learner = learner
        self._settings = settings
        self._folder = folder
        self._store = store
        self._saved = step
        self._is_whole_step = True
        """Whether the weights are those of recorded steps."""

    def update(self, rows: Sequence[Row], on_batch: OnBatch = ignore_batches) -> Mapping[str, float]:
        """See `Learner.step`. The caller records the step and calls `recorded`."""
        self._is_whole_step = False
        try:
            return self._learner.step(rows, on_batch)
        except InfrastructureError:  # the weights may have changed
            raise
        except Exception:
            self._is_whole_step = True
            raise

    def recorded(self) -> None:
        """The step of the last `update` is recorded."""
        self._is_whole_step = True

    def save(self, step: int) -> None:
        """Write a checkpoint. Delete those beyond ``trainer.keep_checkpoints``, and the optimizer's state of the rest.

        The best one is kept.
        """
        if self._is_saved(step):
            return
        self._learner.save(self._path(step))
        self._saved = step
        delete_old(self._folder, self._settings.keep_checkpoints)

    def save_if_due(self, step: int) -> None:
        """`save` if ``trainer.checkpoint_every`` requires it."""
        every = self._settings.checkpoint_every
        if every and step % every == 0 and step < self._settings.steps:
            self.save(step)

    def keep_best(self, step: int) -> None:
        """With ``trainer.keep_best``: keep the current weights if their evaluation is better than the kept weights'."""
        rewards = held_out_rewards(self._store, "eval", "eval_after")
        if not self._settings.keep_best or step not in rewards:
            return
        kept = best_checkpoint(self._folder)
        if kept is None or rewards[step] > rewards.get(checkpoint_step(kept), -math.inf):
            self.save(step)
            mark_best(self._path(step))
            delete_old(self._folder, self._settings.keep_checkpoints)

    @contextmanager
    def saving_progress(self, step: Callable[[], int]) -> Generator[None]:
        """Save a checkpoint if the body raises after updates that no checkpoint has.

        Nothing is saved in the middle of a step: between `update` and its record, or if a second signal interrupts the update.
        """
        try:
            yield
        except (Exception, Interrupted) as error:
            midway = not self._is_whole_step or (isinstance(error, Interrupted) and error.midway)
            if step() > self._saved and not midway:
                try:
                    with uninterrupted():
                        self.save(step())
                except Exception as failure:  # noqa: BLE001 - the error above is the one to report
                    logger.error("no checkpoint could be saved after step %d: %s", step(), describe(failure))
            raise

    def _is_saved(self, step: int) -> bool:
        return self._saved == step and self._path(step).exists()

    def _path(self, step: int) -> Path:
        return self._folder / "checkpoints" / f"step-{step:06d}"
