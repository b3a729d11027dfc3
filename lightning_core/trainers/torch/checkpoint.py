"""Checkpoints: tensors as safetensors, the rest as JSON, written atomically.

weights.safetensors     the trained weights (float32 masters), by the model's names
optimizer.safetensors   AdamW's moments and step counts, ``<name>/<moment>``
critic.safetensors      the value head and its moments; only with a critic
trainer.json            version, random state, and the fingerprint of model and tuning
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_core.errors import TrainingError

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The complete state of a trainer."""

    fingerprint: Mapping[str, Any]
    """Model and tuning, as JSON values; must be equal on loading."""
    version: int
    submitted: int
    """Number of requests to the sampling engine, which seeds later requests."""
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    critic: Mapping[str, Tensor]


def optimizer_moments(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimiser's state as named tensors; empty before its first step."""
    return {
        f"{name}/{key}": value
        for name, parameter in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_moments(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> None:
    """Load what `optimizer_moments` returned."""
    optimizer.state.clear()
    for path, value in moments.items():
        name, key = path.rsplit("/", 1)
        optimizer.state[names[name]][key] = value.to(names[name].device, copy=True)


@contextmanager
def whole(folder: Path) -> Generator[Path]:
    """Yield a temporary sibling folder, which replaces ``folder`` if the block succeeds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield scratch
        scratch.chmod(0o755)  # mkdtemp creates it private
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def write(folder: Path, state: Checkpoint) -> None:
    """Write ``state`` atomically."""
    with whole(folder) as scratch:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in state.weights.items()},
            scratch / "weights.safetensors",
        )
        save_file(dict(state.moments), scratch / "optimizer.safetensors")
        if state.critic:
            save_file(dict(state.critic), scratch / "critic.safetensors")
        facts = {
            "format": FORMAT,
            "fingerprint": state.fingerprint,
            "version": state.version,
            "submitted": state.submitted,
        }
        (scratch / "trainer.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read(folder: Path, fingerprint: Mapping[str, Any], *, weights_only: bool = False) -> Checkpoint:
    """Read what `write` wrote.

    ``weights_only``: skip the moments, which are twice as large as the weights.
    Raises `TrainingError` if it is not a checkpoint or has another fingerprint.
    """
    try:
        facts = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "weights.safetensors")
        moments = {} if weights_only else load_file(folder / "optimizer.safetensors")
        critic = {} if weights_only or not (path := folder / "critic.safetensors").exists() else load_file(path)
    except (OSError, ValueError) as error:
        raise TrainingError(f"{str(folder)!r} is not a checkpoint, or is damaged: {error}") from error
    found: dict[str, Any] = facts["fingerprint"]
    for key in sorted({*found, *fingerprint}):
        if found.get(key) != fingerprint.get(key):
            raise TrainingError(
                f"the checkpoint {str(folder)!r} does not fit: its {key} is {found.get(key)!r}, but this "
                f"trainer's is {fingerprint.get(key)!r}"
            )
    return Checkpoint(
        fingerprint=found,
        version=facts["version"],
        submitted=facts["submitted"],
        weights=weights,
        moments=moments,
        critic=critic,
    )
