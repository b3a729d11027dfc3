"""A run's checkpoints: where they are, and how the policy that is in one is sampled from."""

from __future__ import annotations

from pathlib import Path

from lightning_core.config import Config
from lightning_core.config.trainer import Ray, TrainerSection
from lightning_core.errors import ConfigError

_EXPORT = Path("actor", "huggingface")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of the run in ``folder``, oldest first: ``step-000010``, or ``global_step_10`` of verl's."""
    found = [*(folder / "checkpoints").glob("step-*"), *(folder / "checkpoints").glob("global_step_*")]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    """How many updates came before it."""
    return int(checkpoint.name.replace("-", "_").rpartition("_")[2])


def to_sample(config: Config, checkpoint: Path) -> tuple[Config, Path | None]:
    """The configuration of an embedded trainer that samples from ``checkpoint``, and what it then loads besides.

    Of a run with verl that is the model that its checkpoint exports, and nothing besides. Raises `ConfigError` where there is none.
    """
    if config.trainer.name != "verl":
        return config, checkpoint
    model = checkpoint / _EXPORT
    if not (model / "config.json").is_file():
        raise ConfigError(f"the checkpoint {str(checkpoint)!r} holds no exported model; expected one under {_EXPORT!s}")
    policy = config.policy.model_copy(update={"model": str(model), "tuning": "full", "lora": None})
    return config.model_copy(update={"policy": policy, "trainer": TrainerSection(), "ray": Ray()}), None
