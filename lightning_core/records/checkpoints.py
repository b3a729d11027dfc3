"""A run's checkpoints: their paths, how long they keep the optimizer's state, and which one is the best."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lightning_core.errors import ConfigError

OPTIMIZER = "optimizer.safetensors"
"""The embedded trainer's file of AdamW's moments, twice as large as the trained weights."""
BEST = "best"
"""The link to the checkpoint with the best held-out reward, beside the checkpoints."""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of the run in ``folder``, oldest first; verl's are ``global_step_10``."""
    folders = [*(folder / "checkpoints").glob("step-*"), *(folder / "checkpoints").glob("global_step_*")]
    return sorted(folders, key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    """The number of updates before ``checkpoint``."""
    return int(checkpoint.name.replace("-", "_").rpartition("_")[2])


def drop_optimizer(checkpoint: Path) -> None:
    """Remove the optimizer's state from ``checkpoint``.

    It can still be evaluated, served and exported, but training cannot resume from it.
    """
    for path in checkpoint.rglob(OPTIMIZER):
        path.unlink()


def delete_old(folder: Path, keep: int) -> None:
    """Delete all checkpoints of the run in ``folder`` but the newest ``keep`` and the best.

    Only the newest keeps the optimizer's state.
    """
    folders, best = checkpoints(folder), best_checkpoint(folder)
    for old in folders[:-1]:
        drop_optimizer(old)
    for old in folders[:-keep]:
        if old != best:
            shutil.rmtree(old)


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `mark_best` marked last; None without one."""
    link = folder / "checkpoints" / BEST
    return link.parent / link.readlink() if link.is_symlink() and link.exists() else None


def mark_best(checkpoint: Path) -> None:
    """Link ``checkpoint`` as the best one of its run."""
    scratch = checkpoint.parent / f".{BEST}-{os.getpid()}"
    scratch.symlink_to(checkpoint.name)
    scratch.replace(checkpoint.parent / BEST)


def choose_checkpoint(folder: Path, name: str | None = None) -> Path:
    """The checkpoint ``name`` of the run in ``folder``; None: the newest; ``best``: see `mark_best`.

    Raises `ConfigError` if the run does not have it.
    """
    by_name = {path.name: path for path in checkpoints(folder)}
    if not by_name:
        raise ConfigError(f"the run {str(folder)!r} has no checkpoint yet; expected one under checkpoints/")
    if name == BEST:
        best = best_checkpoint(folder)
        if best is None:
            raise ConfigError(
                f"--checkpoint best: the run {str(folder)!r} kept no best checkpoint (trainer.keep_best); it has {list(by_name)!r}"
            )
        return best
    if name is not None and name not in by_name:
        raise ConfigError(f"--checkpoint {name!r}: the run {str(folder)!r} has {list(by_name)!r}")
    return by_name[name or list(by_name)[-1]]
