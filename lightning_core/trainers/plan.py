"""The input of every trainer: one run to make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_core.config import Config
from lightning_core.records.observer import Observers
from lightning_core.rollouts.prepare import Inputs
from lightning_core.trainers.threads import let_threads_sleep

let_threads_sleep()  # before the agent or a trainer loads torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run: configuration, agent and tasks, and the folder to write to."""

    config: Config
    folder: Path
    """The run's folder."""
    checkpoint: Path | None
    """The checkpoint that a resumed run continues from; None for a new run."""
    inputs: Inputs
    observers: Observers


class TrainerEntry(NamedTuple):
    """An entry of the table of trainers."""

    train: Callable[[Plan], None]
    """Trains until the last step. Writes store, metrics and checkpoints to the run's folder."""
    in_process: bool
    """Whether agents run in this process.

    If so, ``solve`` and ``reward`` need no importable name.
    """
