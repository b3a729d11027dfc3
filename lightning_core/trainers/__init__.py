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
from lightning_core.config.credit import Critic
from lightning_core.config.credit_rules import reward_rule
from lightning_core.config.policies import Lora
from lightning_core.config.resolve import PolicySettings, policy_settings
from lightning_core.errors import MissingExtra
from lightning_core.model.settings import TorchTrainerConfig
from lightning_core.trace import BASE, POLICY
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
    """The trainer that ``config`` asks for. Raises `MissingExtra` if its packages are not installed."""
    try:
        module = import_module("lightning_core.trainers.torch.trainer")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_core"):
            raise
        raise MissingExtra(error.name, "torch", "the embedded trainer") from error
    p = config.policy
    configs = {name: torch_config(config, settings) for name, settings in policy_settings(config).items()}
    if config.policies:
        return import_module("lightning_core.trainers.torch.multi_policy").SeveralTrainer(configs, base=p.model)
    trainer = module.TorchTrainer(configs[POLICY])
    if p.backend == "torch":
        return trainer
    served = import_module("lightning_core.trainers.torch.vllm_trainer")
    return served.VllmTrainer(trainer, url=p.vllm.url, args=p.vllm.args)


def torch_config(config: Config, settings: PolicySettings) -> TorchTrainerConfig:
    """What determines the trainer of one policy of ``config``."""
    p, t, judge, credit = config.policy, config.trainer, config.credit.judge, settings.credit
    lora = settings.lora or Lora()
    return TorchTrainerConfig(
        model=settings.model,
        tuning=settings.tuning,
        train_layers=settings.train_layers,
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_target_modules=lora.target_modules,
        keep_base=BASE in config.agents.frozen.values() or (judge is not None and judge.model == BASE),
        dtype=p.dtype,
        device=p.device,
        gradient_checkpointing=p.gradient_checkpointing,
        max_context=p.max_context,
        learning_rate=settings.learning_rate,
        warmup_steps=t.warmup_steps,
        betas=t.betas,
        weight_decay=t.weight_decay,
        grad_clip=t.grad_clip,
        algorithm=config.algorithm,
        critic=(credit.critic or Critic()) if reward_rule(credit).needs_critic else None,
        micro_batch_tokens=t.micro_batch_tokens,
        max_batch=t.max_batch,
        gather_ms=t.gather_ms,
        threads=t.threads,
        seed=config.run.seed,
    )
