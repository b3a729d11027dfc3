"""The model that verl exports with each checkpoint."""

from __future__ import annotations

from pathlib import Path

from lightning_core.errors import ConfigError

_EXPORT = Path("actor", "huggingface")


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
