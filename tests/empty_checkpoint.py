"""Checkpoints without weights."""

from __future__ import annotations

from pathlib import Path

from lightning_core.records.run_folder.manifest import write_manifest


def make_empty_checkpoint(folder: Path, step: int) -> Path:
    """A finished checkpoint after ``step`` updates of the run in ``folder``, with nothing but its manifest."""
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, step=step, run=folder)
    return checkpoint
