"""A run's folder: created for a new run, found for a resumed one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lightning_core.config import Config, dump_config
from lightning_core.errors import ConfigError, need_path
from lightning_core.records.checkpoints import checkpoint_step, checkpoints
from lightning_core.records.commit import record_commit


def create_folder(folder: Path, config: str) -> None:
    """Create ``folder`` with the configuration ``config``. Raises `ConfigError` if it exists or cannot be created."""
    with need_path("create the run's folder", "Set run.dir to a folder that you may write to"):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"the run's folder {str(folder)!r} exists; set another run.name, or resume the run with run.resume"
            ) from None
        (folder / "config.yaml").write_text(config, encoding="utf-8")


def open_run_folder(config: Config) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint to continue from if the run is resumed.

    A new folder is linked as ``latest``. Raises `ConfigError` if there is nothing to resume, if
    the folder of a new run exists, or if a rule cannot be imported.
    """
    runs = Path(config.run.dir)
    latest = runs / "latest"
    if config.run.resume:
        folder = runs / config.run.name if config.run.name else latest.resolve()
        found = checkpoints(folder)
        if not found:
            raise ConfigError(
                f"run.resume: no checkpoint under {str(folder / 'checkpoints')!r}; start the run without resume"
            )
        record_commit(folder, Path.cwd(), step=checkpoint_step(found[-1]))
        return folder, found[-1]
    text = dump_config(config)
    folder = runs / (config.run.name or time.strftime("%Y%m%d-%H%M%S"))
    create_folder(folder, text)
    record_commit(folder, Path.cwd())
    scratch = runs / f".latest-{os.getpid()}"
    scratch.symlink_to(folder.name)
    scratch.replace(latest)
    return folder, None
