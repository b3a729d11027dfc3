"""The configuration and the checkpoint of a model to serve: of a run, of a folder, or by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_core.errors import ConfigError

if TYPE_CHECKING:
    from lightning_core.config import Config


def resolve_served(model: str, checkpoint: str | None, overrides: Sequence[str]) -> tuple[Config, Path | None]:
    """The configuration to serve, and the checkpoint to load its weights from, if any.

    ``model``: a run's folder, a model's folder, or a model's name. ``overrides``: settings, as ``key=value``. Raises `ConfigError` if
    there is no such run or checkpoint.
    """
    from lightning_core.config import load_config

    folder = Path(model)
    if (folder / "config.yaml").is_file():
        from lightning_core.records.run_folder.checkpoints import checkpoint_step, choose_checkpoint
        from lightning_core.records.run_folder.configs import config_of_step
        from lightning_core.trainers.own_model import sampling_config

        chosen = choose_checkpoint(folder, checkpoint)
        return sampling_config(load_config(config_of_step(folder, checkpoint_step(chosen)), overrides), chosen)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{model!r} is neither a run's folder (config.yaml) nor a model's (config.json); "
            "to serve a checkpoint, pass its run's folder and --checkpoint"
        )
    from lightning_core.records.run_folder.runs import missing_run

    # A name without a folder may be a model's on the Hub.
    if folder.parent != Path() and (missing := missing_run(folder)) is not None:
        raise ConfigError(f"{missing}. Expected a run's folder, a model's folder, or a model's name")
    if folder.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"{model!r} is a configuration; expected a run's folder such as runs/latest, a model's folder, a model's name, "
            "or the plan of a switch"
        )
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint requires a run's folder; {model!r} is not one")
    return load_config({"policy": {"model": model}}, overrides), None
