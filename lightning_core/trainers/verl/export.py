"""The model that verl exports with each checkpoint."""

from __future__ import annotations

from pathlib import Path

from lightning_core.config import Config
from lightning_core.config.trainer import Ray, TrainerSection
from lightning_core.errors import ConfigError
from lightning_core.trainers.own_model import with_own_model

_EXPORT = Path("actor", "huggingface")


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


def exported_model(checkpoint: Path) -> Path:
    """The Hugging Face folder in verl's ``checkpoint``. Raises `ConfigError` if it has no weights."""
    model = checkpoint / _EXPORT
    if not (model / "config.json").is_file() or not any(model.glob("*.safetensors")):
        actor = checkpoint / "actor"
        raise ConfigError(
            f"the checkpoint {str(checkpoint)!r} contains no model with weights under {_EXPORT!s}. To make one from verl's "
            f"shards, run: python -m verl.model_merger merge --backend fsdp --local_dir {actor} --target_dir {model}"
        )
    return model
