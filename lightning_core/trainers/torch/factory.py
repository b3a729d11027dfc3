"""The embedded trainer of a configuration."""

from __future__ import annotations

from lightning_core.config import Config
from lightning_core.config.resolve import policy_settings
from lightning_core.rollouts.signal import Critic
from lightning_core.trace import POLICY
from lightning_core.trainers import Trainer
from lightning_core.trainers.torch.multi_policy import MultiPolicyTrainer
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.trainers.torch.vllm_trainer import VllmTrainer


def make_torch_trainer(config: Config, *, samples: bool = True) -> Trainer:
    """The trainer for the policies of ``config``.

    ``policy.backend`` selects who samples. ``samples``: whether anybody does.
    """
    policies, algorithm, settings, seed = policy_settings(config), config.algorithm, config.trainer, config.run.seed
    if config.policies:
        several = MultiPolicyTrainer(policies, algorithm, settings, seed=seed, base=config.policy.model)
        return _trainer(several, several.critic)
    here = config.policy.backend == "torch"
    trainer = TorchTrainer(policies[POLICY], algorithm, settings, seed=seed, samples=samples and here)
    sampled: TorchTrainer | VllmTrainer = trainer
    if samples and not here:
        sampled = VllmTrainer(trainer, url=config.policy.vllm.url, args=config.policy.vllm.args)
    return _trainer(sampled, trainer.critic, vocabulary=trainer.vocabulary)


def _trainer(
    learner: TorchTrainer | MultiPolicyTrainer | VllmTrainer, critic: Critic | None, *, vocabulary: int | None = None
) -> Trainer:
    return Trainer(
        learner=learner,
        backend=learner.backend,
        chats=learner.chats,
        notes=learner.notes,
        critic=critic,
        vocabulary=vocabulary,
    )
