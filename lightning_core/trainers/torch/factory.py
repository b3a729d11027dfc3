"""The embedded trainer of a configuration."""

from __future__ import annotations

from contextlib import ExitStack

from lightning_core.backends.backend import Backend
from lightning_core.config import Config
from lightning_core.config.algorithm import Algorithm
from lightning_core.config.resolve import PolicySettings, policy_settings
from lightning_core.config.trainer import TrainerSection
from lightning_core.trace import BASE, POLICY
from lightning_core.trainers import Learner, Trainer
from lightning_core.trainers.torch.build import open_backend
from lightning_core.trainers.torch.critic import open_critic
from lightning_core.trainers.torch.multi_policy import MultiPolicyTrainer
from lightning_core.trainers.torch.policy_model import PolicyModel
from lightning_core.trainers.torch.trainer import TorchTrainer
from lightning_core.trainers.torch.vllm_trainer import VllmTrainer
from lightning_core.trainers.torch.weights_digest import weights_digest


def make_torch_trainer(config: Config, *, samples: bool = True) -> Trainer:
    """The trainer for the policies of ``config``.

    ``policy.backend`` selects who samples. ``samples``: whether anybody does.
    """
    policies, algorithm, settings, seed = policy_settings(config), config.algorithm, config.trainer, config.run.seed
    if config.policies:
        several = MultiPolicyTrainer(policies, algorithm, settings, seed=seed, base=config.policy.model)
        return Trainer(
            learner=several,
            backend=several.backend,
            chats=several.chats,
            notes=several.notes,
            forget_contexts=several.backend.forget_contexts,
            critic=open_critic(several.policies),
            digest=lambda: weights_digest({name: own.model for name, own in several.policies.items()}),
        )
    here = config.policy.backend == "torch"
    trainer = open_trainer(policies[POLICY], algorithm, settings, seed=seed, samples=samples and here)
    learner: Learner = trainer
    backend: Backend = trainer.backend
    if samples and not here:
        learner = server = VllmTrainer(trainer, url=config.policy.vllm.url, args=config.policy.vllm.args)
        backend = server.backend
    return Trainer(
        learner=learner,
        backend=backend,
        chats=dict.fromkeys(backend.models, trainer.model.chat),
        notes=trainer.model.notes,
        forget_contexts=trainer.backend.forget_contexts if backend is trainer.backend else lambda: None,
        critic=open_critic({POLICY: trainer}),
        vocabulary=trainer.model.vocabulary,
        digest=lambda: weights_digest({POLICY: trainer.model}),
    )


def open_trainer(
    policy: PolicySettings, algorithm: Algorithm, settings: TrainerSection, *, seed: int, samples: bool = True
) -> TorchTrainer:
    """The trainer of one policy, with its own engine. ``samples``: whether the engine is used.

    Raises `ConfigError` for a model or settings that cannot be used.
    """
    model = PolicyModel(policy, algorithm, settings, seed=seed, samples=samples)
    with ExitStack() as stack:
        backend = open_backend(settings, model.loaded.max_context, seed=seed)
        stack.callback(backend.close)
        trainer = TorchTrainer(model, backend, algorithm, settings, seed=seed)
        if model.base is not None:
            memory = model.memory
            backend.add(
                BASE, model.base, live=False, cached_tokens=memory.cache_tokens, row_bytes=memory.row_bytes or None
            )
        stack.pop_all()
    return trainer
