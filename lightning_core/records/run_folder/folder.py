"""A run's folder: created for a new run, found for a resumed one."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from lightning_core.config import Config, dump_config
from lightning_core.errors import ConfigError, did_you_mean
from lightning_core.model.folders import remove_leftovers
from lightning_core.records.atomic import is_scratch, link_atomically, write_atomically
from lightning_core.records.failures import need_path
from lightning_core.records.run_folder.checkpoints import checkpoint_step, checkpoints, newest_sound, set_aside_newer
from lightning_core.records.run_folder.commit import record_commit
from lightning_core.records.run_folder.configs import record_config
from lightning_core.records.run_folder.manifest import write_run_id
from lightning_core.records.run_folder.runs import is_run, run_folders

logger = logging.getLogger(__name__)

SUPERVISED = "sft.json"
"""The file with the sources of a run of `lightning-rl sft`."""


def create_folder(folder: Path, config: str) -> None:
    """Create ``folder`` with the configuration ``config``. Raises `ConfigError` if it exists or cannot be created."""
    with need_path("create the run's folder", "Set run.dir to a folder that you may write to"):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():  # a file or a link is in the way
                raise
            if not all(map(is_scratch, folder.iterdir())):  # such a one was left by a run that was killed here
                raise ConfigError(
                    f"the run's folder {str(folder)!r} exists; set another run.name, or resume the run with run.resume"
                ) from None
        write_atomically(folder / "config.yaml", config)


def open_run_folder(config: Config) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint to continue from if the run is resumed and has one.

    Of its checkpoints it is the newest without a problem. A new folder is linked as ``latest``.

    Raises `ConfigError` if there is nothing to resume, if the folder of a new run exists, or if a rule cannot be imported.
    """
    runs = Path(config.run.dir)
    latest = runs / "latest"
    if config.run.resume:
        folder = runs / config.run.name if config.run.name else latest.resolve()
        if (folder / SUPERVISED).is_file():
            raise ConfigError(
                f"run.resume: {str(folder)!r} is a run of `lightning-rl sft`, which cannot be resumed; start a run from its weights, "
                "with policy.model (see docs/sft.md)"
            )
        if not is_run(folder) and not checkpoints(folder):
            raise ConfigError(_nothing_to_resume(folder, runs))
        return folder, newest_sound(folder, training=True)
    text = dump_config(config)
    folder = runs / (config.run.name or time.strftime("%Y%m%d-%H%M%S"))
    create_folder(folder, text)
    write_run_id(folder)
    record_commit(folder, Path.cwd())
    link_atomically(latest, folder.name)
    return folder, None


def record_resume(config: Config, folder: Path, checkpoint: Path | None) -> None:
    """Record the configuration and the commit that the run in ``folder`` continues with from ``checkpoint``; None: from its beginning.

    Checkpoints that are newer are renamed, and what killed processes left is removed.
    """
    step = 0 if checkpoint is None else checkpoint_step(checkpoint)
    record_config(folder, config, step=step)
    if record_commit(folder, Path.cwd(), step=step):
        logger.warning(
            "the code in the working directory has changed since the run was last started (commit.txt): what is recorded up to step %d, "
            "such as held-out rewards before training, is of the earlier code",
            step,
        )
    write_run_id(folder)
    if (folder / "checkpoints").is_dir():
        set_aside_newer(folder, checkpoint)
        remove_leftovers(folder / "checkpoints")


def _nothing_to_resume(folder: Path, runs: Path) -> str:
    names = sorted((run.name for run in run_folders(runs)), reverse=True) if runs.is_dir() else []
    if not names:
        return f"run.resume: there is no run in {str(runs.absolute())!r} (run.dir); start one without resume"
    listed = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
    meant = did_you_mean(folder.name, names) or f"it has {listed}"
    return f"run.resume: there is no run {folder.name!r} in {str(runs)!r}; {meant}"
