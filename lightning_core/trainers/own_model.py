"""The model to sample from a checkpoint, or to continue from it on a machine without the model that the run began with."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_core.config import Config
from lightning_core.config.resolve import PolicySettings, policy_settings
from lightning_core.config.trainer import Ray, TrainerSection
from lightning_core.errors import ConfigError
from lightning_core.model.source import is_demo_model, resolve_model
from lightning_core.records.run_folder.configs import read_settings
from lightning_core.trace import POLICY
from lightning_core.trainers.verl.export import exported_model

logger = logging.getLogger(__name__)


def sampling_config(config: Config, checkpoint: Path) -> tuple[Config, Path | None]:
    """The configuration to sample from ``checkpoint``, and a checkpoint to load, if any.

    The trainer is always ``torch``. For a run with verl, the model is the one that its checkpoint
    exports, and there is no checkpoint to load. Raises `ConfigError` if verl exported no model.
    """
    if config.trainer.name != "verl":
        return with_own_model(config, checkpoint), checkpoint
    model = exported_model(checkpoint)
    policy = config.policy.model_copy(update={"model": str(model), "tuning": "full", "lora": None})
    return config.model_copy(update={"policy": policy, "trainer": TrainerSection(), "ray": Ray()}), None


def with_own_model(config: Config, checkpoint: Path) -> Config:
    """``config`` with ``checkpoint`` as the model, if ``policy.model`` is a folder that is not here and nothing else needs it.

    The initial weights are needed for a KL term and for agents, judges and teachers on ``base``. With several policies nothing changes.
    """
    if config.policies or config.algorithm.kl is not None:
        return config
    settings = policy_settings(config)[POLICY]
    model = settings.model if settings.keep_base else own_model(settings, checkpoint)
    return config.model_copy(update={"policy": config.policy.model_copy(update={"model": model})})


def own_model(policy: PolicySettings, folder: Path) -> str:
    """The model of ``policy``, or its checkpoint in ``folder``, with a warning, if that is whole and the model is not here.

    A model that is not the one of the run's configuration is never replaced.
    """
    if policy.lora is not None or not (folder / "config.json").is_file() or is_demo_model(policy.model):
        return policy.model
    recorded = read_settings(folder.parents[1]).get("policy")
    if not isinstance(recorded, dict) or recorded.get("model") != policy.model:
        return policy.model
    try:
        resolve_model(policy.model)
    except ConfigError as error:
        logger.warning("the copy of the model in %r is used: %s", str(folder), error)
        return str(folder)
    return policy.model
