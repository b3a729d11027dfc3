"""Trainers: rows with advantages in, new weights out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from lightning_core.config import Config
from lightning_core.config_credit import Critic
from lightning_core.errors import MissingExtra
from lightning_core.policy.backend import Backend
from lightning_core.policy.chat import Tokenizer
from lightning_core.transitions import Row, Transition

# OpenMP's threads otherwise spin while they wait for each other. On a machine that does anything else as well (an agent's
# tools, a browser) that was measured to make a step 4 to 30 times slower. It is read once, when torch is loaded, so it must
# be set before that; a value that the user has set is left alone.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


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

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the weights."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end a response, as the model's generation settings have them."""
        ...

    def step(self, rows: Sequence[Row]) -> Mapping[str, float]:
        """Update the weights once on all ``rows`` (each with advantages) and return the step's metrics.

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
    """The trainer that ``config`` asks for. Raises `MissingExtra` if its packages are not installed."""
    try:
        module = import_module("lightning_core.trainers.torch_trainer")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_core"):
            raise
        raise MissingExtra(error.name, "torch", "the embedded trainer") from error
    p, t, judge = config.policy, config.trainer, config.credit.judge
    lora = (
        {}
        if p.lora is None
        else {"lora_rank": p.lora.rank, "lora_alpha": p.lora.alpha, "lora_target_modules": p.lora.target_modules}
    )
    trainer = module.TorchTrainer(
        module.TorchTrainerConfig(
            model=p.model,
            tuning=p.tuning,
            train_layers=p.train_layers,
            **lora,
            keep_base="base" in config.agents.frozen.values() or (judge is not None and judge.model == "base"),
            dtype=p.dtype,
            device=p.device,
            gradient_checkpointing=p.gradient_checkpointing,
            max_context=p.max_context,
            learning_rate=t.learning_rate,
            warmup_steps=t.warmup_steps,
            betas=t.betas,
            weight_decay=t.weight_decay,
            grad_clip=t.grad_clip,
            algorithm=config.algorithm,
            critic=(config.credit.critic or Critic()) if config.credit.rewards == "gae" else None,
            micro_batch_tokens=t.micro_batch_tokens,
            max_batch=t.max_batch,
            gather_ms=t.gather_ms,
            threads=t.threads,
            seed=config.run.seed,
        )
    )
    if p.backend == "torch":
        return trainer
    served = import_module("lightning_core.trainers.vllm_trainer")
    return served.VllmTrainer(trainer, url=p.vllm.url, args=p.vllm.args)
