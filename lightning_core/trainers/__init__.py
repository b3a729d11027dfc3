"""Trainers: update weights from rows with advantages."""

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
from lightning_core.trace import Floats
from lightning_core.transitions import Candidates, Row, Transition

# By default OpenMP's threads spin while they wait for each other. With other load on the machine (an agent's tools, a browser) a
# step was measured to be 4 to 30 times slower. torch reads the variable once, when it is loaded. A value set by the user is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Trainer(Protocol):
    """Holds and updates the weights of one policy or several."""

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was decided for the model and the machine when the weights were loaded, one line each."""
        ...

    @property
    def backend(self) -> Backend:
        """Samples from the current weights."""
        ...

    @property
    def chats(self) -> Mapping[str, Chat]:
        """The chat format of each of the backend's models."""
        ...

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """Update each policy on the ``rows`` that it sampled, and return the step's metrics.

        A step without rows keeps the weights, and counts. Raises `TrainingError` and leaves the weights unchanged if the loss or
        the gradient is not finite.
        """
        ...

    def logprobs(self, rows: Sequence[Row]) -> Mapping[str, Floats]:
        """The logprobs of the sampled tokens of ``rows`` under the current weights: float32 [T] by call id, as at sampling."""
        ...

    def teacher_logprobs(self, rows: Sequence[Row]) -> Mapping[str, Floats]:
        """`logprobs` under the teacher of ``algorithm.distill``, which must be set."""
        ...

    def teacher_candidates(self, rows: Sequence[Row]) -> Mapping[str, Candidates]:
        """The most likely tokens of that teacher at the sampled tokens of ``rows``, by call id."""
        ...

    def expected(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """The critic's expected return at each call's prompt, by call id.

        Raises `TrainingError` if there is no critic.
        """
        ...

    def learn_expected(self, targets: Mapping[str, float]) -> Mapping[str, float]:
        """Fit the critic to ``targets`` and return metrics.

        ``targets``: the returns of calls it scored, by call id.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write all state that `load` needs: weights, optimiser, version, random state."""
        ...

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Restore the state written by `save`.

        With ``weights_only``, skip the optimiser's state, to sample only.

        Raises `TrainingError` if it was saved from another model or tuning.
        """
        ...

    def close(self) -> None:
        """Stop sampling and free the weights."""
        ...


def make_trainer(config: Config, *, samples: bool = True) -> Trainer:
    """The trainer that ``config`` selects. ``samples``: whether its backend is used; otherwise it keeps no memory for it.

    Raises `MissingExtra` if its packages are not installed.
    """
    try:
        module = import_module("lightning_core.trainers.torch.factory")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_core"):
            raise
        raise MissingExtra(error.name, "torch", "the embedded trainer") from error
    return module.make_torch_trainer(config, samples=samples)
