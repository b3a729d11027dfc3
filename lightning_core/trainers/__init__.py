"""Trainers: rows with advantages in, new weights out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from lightning_core.backends.backend import Backend
from lightning_core.chat.chat import Chat
from lightning_core.config import Config
from lightning_core.errors import MissingExtra
from lightning_core.transitions import Row, Transition

# OpenMP's threads otherwise spin while they wait for each other. On a machine that does anything else as well (an agent's
# tools, a browser) that was measured to make a step 4 to 30 times slower. It is read once, when torch is loaded, so it must
# be set before that; a value that the user has set is left alone.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Trainer(Protocol):
    """Holds the weights of one policy or several, and improves them."""

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        ...

    @property
    def backend(self) -> Backend:
        """Samples from the weights as they are now."""
        ...

    @property
    def chats(self) -> Mapping[str, Chat]:
        """The chat format of each of the backend's models."""
        ...

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """Update each policy on those of ``rows`` (with advantages) that it has sampled, and return the step's metrics.

        Raises `TrainingError` when the loss or the gradient is not finite; the weights are then as before.
        """
        ...

    def expected(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """What the critic expects of the rest of the rollout at each call's prompt, by call id.

        Raises `TrainingError` if there is no critic.
        """
        ...

    def learn_expected(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        """Teach the critic what it should have said of calls that it was asked about; returns metrics."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to continue exactly: weights, optimiser, version, random state."""
        ...

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Continue from what `save` wrote; with ``weights_only`` to sample, without the optimiser's state.

        Raises `TrainingError` if it belongs to another model or tuning.
        """
        ...

    def close(self) -> None:
        """Stop sampling and free the weights."""
        ...


def make_trainer(config: Config) -> Trainer:
    """The trainer that ``config`` selects.

    Raises `MissingExtra` if its packages are not installed.
    """
    try:
        module = import_module("lightning_core.trainers.torch.make")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_core"):
            raise
        raise MissingExtra(error.name, "torch", "the embedded trainer") from error
    return module.make_torch_trainer(config)
