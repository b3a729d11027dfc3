"""Steps whose updates fail: the weights and the optimizer stay as before, and the step is repeated, skipped, or raised."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from lightning_core.errors import NonFiniteError, OutOfMemoryError, TrainingError, plural
from lightning_core.model.out_of_memory import is_out_of_memory
from lightning_core.records.failures import failure_of
from lightning_core.trainers.micro_batches import OnBatch
from lightning_core.trainers.torch.checkpoint import Checkpoint
from lightning_core.trainers.torch.mini_batches import MiniBatch, step_metrics
from lightning_core.trainers.torch.packing import pass_tokens
from lightning_core.trainers.torch.policy_model import PolicyModel
from lightning_core.trainers.torch.update import Updater
from lightning_core.transitions import Row

logger = logging.getLogger(__name__)

_MOST_SKIPPED = 2
"""Steps in a row that may be skipped; the next one ends the run."""
_ADVICE = "Lower trainer.learning_rate or trainer.grad_clip, or set policy.dtype: float32"


class UndoneUpdates:
    """Makes the updates of steps, each as a whole or not at all."""

    def __init__(
        self,
        model: PolicyModel,
        updater: Updater,
        *,
        state: Callable[[], Checkpoint],
        restore: Callable[[Checkpoint], None],
        release: Callable[[], bool],
    ) -> None:
        """``state`` and ``restore``: the trainer's. ``release``: frees memory that is not needed; returns whether there was any."""
        self._model = model
        self._updater = updater
        self._state = state
        self._restore = restore
        self._release = release
        self.skipped = 0
        """Number of the last steps in a row that were skipped."""
        self.micro_batch_tokens: int | None = None
        """The size of micro-batches after updates that did not fit the memory; None if all did."""

    def restore(self, *, skipped: int, micro_batch_tokens: int | None) -> None:
        """Continue as after steps of which the last ``skipped`` were skipped, with micro-batches of at most ``micro_batch_tokens``."""
        self.skipped, self.micro_batch_tokens = skipped, micro_batch_tokens
        before = self._model.memory.micro_batch_tokens
        if micro_batch_tokens is not None and micro_batch_tokens < before:
            self._model.memory = replace(self._model.memory, micro_batch_tokens=micro_batch_tokens)
            logger.warning(
                "an earlier update of the run did not fit the memory, so micro-batches have up to %d tokens instead of %d",
                *(micro_batch_tokens, before),
            )

    def step(self, rows: Sequence[Row], step: int, on_batch: OnBatch) -> Mapping[str, float]:
        """The metrics of the updates on ``rows``. ``step``: the number of steps before this one.

        Updates that do not fit the memory are repeated without the memory of running responses, and then with smaller micro-batches,
        which later steps keep. Updates whose loss or gradient is not finite are skipped. Raises `OutOfMemoryError` if the smallest do
        not fit, and `NonFiniteError` for the third step in a row that would be skipped. After any error the weights are as before.
        """
        repeated = 0
        while True:
            parts = self._updater.mini_batches(rows, step)
            try:
                metrics = self._update(parts, step, on_batch)
            except NonFiniteError as error:
                return self._skip(parts, error, step)
            except Exception as error:
                if isinstance(error, TrainingError) or not is_out_of_memory(error):
                    raise
                failure = failure_of(error)
                assert failure is not None
                problem = failure.problem
            else:
                self.skipped = 0
                return {**metrics, "updates_repeated": repeated} if repeated else metrics
            # Outside the except clause: the traceback holds the tensors of the update.
            repeated += 1
            if self._release():
                logger.warning(
                    "step %d: the update failed, %s; it is repeated without the memory of running responses",
                    step + 1,
                    problem,
                )
            else:
                self._shrink(parts, problem, step)
            gc.collect()
            if self._model.device.type == "cuda":
                torch.cuda.empty_cache()

    def _update(self, parts: Sequence[MiniBatch], step: int, on_batch: OnBatch) -> Mapping[str, float]:
        optimizer = self._updater.optimizer
        with ExitStack() as undo:
            if self._updater.algorithm.updates_per_step * len(parts) > 1:
                # A later update can fail after earlier ones have changed the weights.
                undo.callback(self._restore, self._state().copy())
            elif not optimizer.moments():  # the first update allocates them, before it changes the weights
                undo.callback(optimizer.restore, {})
            undo.callback(self._model.tuning.zero_grad)
            metrics = self._updater.step(parts, step, on_batch)
            undo.pop_all()
        return metrics

    def _skip(self, parts: Sequence[MiniBatch], error: NonFiniteError, step: int) -> Mapping[str, float]:
        if self.skipped == _MOST_SKIPPED:
            raise NonFiniteError(f"{error}. It is the third such step in a row. {_ADVICE}") from error
        self.skipped += 1
        logger.warning("%s, so the step is skipped; the third in a row ends the run. %s", error, _ADVICE)
        return {**step_metrics(parts, []), "updates_skipped": 1}

    def _shrink(self, parts: Sequence[MiniBatch], problem: str, step: int) -> None:
        """Halve the micro-batches. Raises `OutOfMemoryError` if they cannot be smaller."""
        batches = [batch for part in parts for batch in part.batches]
        sizes = [pass_tokens(self._model.path, batch) for batch in batches]
        divisible = [size for size, batch in zip(sizes, batches, strict=True) if len(batch.rows) > 1]
        tokens = max(divisible, default=0) // 2
        largest = max(sizes)
        if not 0 < tokens < self._model.memory.micro_batch_tokens:
            raise OutOfMemoryError(
                f"step {step + 1}: the update failed, {problem}, with micro-batches of up to {plural(largest, 'token')}, which cannot be "
                "smaller; the weights are unchanged. Free memory or raise its limit, or lower policy.max_context or trainer.cache_gb, "
                "or use policy.tuning: lora or policy.gradient_checkpointing"
            )
        self.micro_batch_tokens = tokens
        self._model.memory = replace(self._model.memory, micro_batch_tokens=tokens)
        logger.warning(
            "step %d: the update failed, %s; it is repeated with micro-batches of up to %d tokens instead of %d, which the run keeps. "
            "trainer.micro_batch_tokens: %d starts with them",
            *(step + 1, problem, tokens, largest, tokens),
        )
