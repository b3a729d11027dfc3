"""Trainers: rows with advantages in, new weights out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lightning_core.policy.backend import Backend
from lightning_core.transitions import Row


class Trainer(Protocol):
    """Holds the policy's weights and improves them. One `step` is one policy version."""

    @property
    def version(self) -> int:
        """Number of steps taken; the version that the backend stamps on what it samples."""
        ...

    @property
    def backend(self) -> Backend:
        """Samples from the weights as they are now."""
        ...

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """Update the weights once on all ``rows`` (each with advantages) and return the step's metrics.

        Raises `TrainingError` when the loss or the gradient is not finite; the weights are then as before.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to continue exactly: weights, optimiser, version, random state."""
        ...

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote. Raises `TrainingError` if it belongs to another model or tuning."""
        ...

    def close(self) -> None:
        """Stop sampling and free the weights."""
        ...
