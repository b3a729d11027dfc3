"""A run's checkpoints: their paths."""

from __future__ import annotations

from pathlib import Path


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of the run in ``folder``, oldest first; verl's are ``global_step_10``."""
    found = [*(folder / "checkpoints").glob("step-*"), *(folder / "checkpoints").glob("global_step_*")]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    """The number of updates before ``checkpoint``."""
    return int(checkpoint.name.replace("-", "_").rpartition("_")[2])
