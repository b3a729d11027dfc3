"""Trainers: update weights from rows with advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lightning_core.errors import MissingExtra
from lightning_core.trainers.micro_batches import OnBatch, ignore_batches
from lightning_core.trainers.threads import let_threads_sleep

if TYPE_CHECKING:  # the configuration loads this module
    from lightning_core.backends.backend import Backend
    from lightning_core.chat.chat import Chat
    from lightning_core.config import Config
    from lightning_core.rollouts.signal import Critic, TokenScorer
    from lightning_core.transitions import Row


class Learner(Protocol):
    """Holds and updates the weights of one policy or several."""

    def step(self, rows: Sequence[Row], on_batch: OnBatch = ignore_batches) -> Mapping[str, float]:
        """Update each policy on the ``rows`` that it sampled, and return the step's metrics.

        ``on_batch``: called for each micro-batch. It starts again at 0 for each policy, and if the updates are repeated.
        A step without rows keeps the weights, and counts. If no row has a gradient, the metrics of an update, such as ``loss`` and
        ``grad_norm``, are missing, as for an update whose loss or gradient is not finite, which is skipped.
        Raises `TrainingError` if the third step in a row would be skipped. After any exception but `InfrastructureError`, which a
        sampler that lacks the new weights raises, the weights are unchanged.
        """
        ...

    def scorer(self, model: str) -> TokenScorer:
        """The scorer under the weights ``model``: ``policy`` for the current ones of each row's policy, ``base`` for the initial ones,
        or the folder or name of another model with the same vocabulary.

        Raises `ConfigError` for a model that cannot be used.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write all state that `load` needs: weights, optimizer, version, random state."""
        ...

    def load(self, folder: Path, *, weights_only: bool = False) -> int:
        """Restore the state written by `save`, and return its number of completed steps.

        With ``weights_only``, skip the optimizer's state, to sample only.

        Raises `TrainingError` if it was saved from another model or tuning.
        """
        ...

    def close(self) -> None:
        """Stop sampling and free the weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A learner, and what samples from its weights."""

    learner: Learner
    backend: Backend
    """Samples from the current weights."""
    chats: Mapping[str, Chat]
    """The chat format of each of the backend's models."""
    notes: Sequence[str]
    """The decisions for the model and the machine when the weights were loaded, one line each."""
    forget_contexts: Callable[[], None] = lambda: None
    """Drop what the backend keeps of earlier prompts, so what it samples next does not depend on them."""
    critic: Critic | None = None
    vocabulary: int | None = None
    """Number of tokens that the policy has logits for; None with several policies."""
    digest: Callable[[], str] | None = None
    """Computes a digest of the current weights; None: it cannot."""


def make_trainer(config: Config, *, samples: bool = True) -> Trainer:
    """The trainer that ``config`` selects. ``samples``: whether its backend is used; otherwise it keeps no memory for it.

    Raises `MissingExtra` if its packages are not installed.
    """
    let_threads_sleep()
    try:
        module = import_module("lightning_core.trainers.torch.factory")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_core"):
            raise
        raise MissingExtra(error.name, "torch", "the embedded trainer") from error
    return module.make_torch_trainer(config, samples=samples)
