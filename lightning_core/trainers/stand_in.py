"""Evaluations of a provider's model (``eval.model``), which need no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.config import Config
from lightning_core.config.resolve import policy_settings
from lightning_core.errors import ConfigError
from lightning_core.trace import BASE
from lightning_core.trainers import OnBatch, Trainer, ignore_batches, make_trainer
from lightning_core.transitions import Row

_PROVISIONAL = "ok"
"""The answer to calls of agents that are not known yet. Their attempts are repeated, so no result depends on it."""


class _NoWeights:
    """A learner without weights, which only ends."""

    def step(self, rows: Sequence[Row], on_batch: OnBatch = ignore_batches) -> Mapping[str, float]:
        self._refuse()

    def scorer(self, model: str) -> NoReturn:
        self._refuse()

    def save(self, folder: Path) -> None:
        self._refuse()

    def load(self, folder: Path, *, weights_only: bool = False) -> int:
        self._refuse()

    def close(self) -> None:
        """Nothing is open."""

    def _refuse(self) -> NoReturn:
        raise RuntimeError("an evaluation of eval.model has no weights")


def sampling_trainer(config: Config, checkpoint: Path | None) -> Trainer:
    """The trainer of an evaluation: without weights if ``eval.model`` answers in place of the policies, and no other agent needs them.

    Raises `ConfigError` for ``eval.model`` with a checkpoint or with the name of one of the run's own models.
    """
    model, names = config.eval.model, tuple(policy_settings(config))
    if model is None:
        return make_trainer(config)
    if model in (BASE, *names):
        raise ConfigError(
            f"eval.model is {model!r}, which stands for this run's own weights; remove the key: `lightning-rl eval` measures them"
        )
    if checkpoint is not None:
        raise ConfigError(
            f"eval.model is {model!r}, so the checkpoint {str(checkpoint)!r} would not be used; leave one out"
        )
    if {BASE, *names} & set(config.agents.frozen.values()):
        return make_trainer(config)
    backend = ScriptedBackend(lambda _: _PROVISIONAL, models=())
    return Trainer(
        learner=_NoWeights(),
        backend=backend,
        chats=dict.fromkeys(names, Chat(backend.tokenizer)),
        notes=[f"{model} answers in place of the policy; no weights are loaded"],
    )
