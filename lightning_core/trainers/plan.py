"""A run to make, as every trainer gets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_core.config import Config
from lightning_core.records.progress import Progress
from lightning_core.rollouts.runner import RewardFunction, Solve, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is known when a run starts."""

    config: Config
    folder: Path
    """The run's folder."""
    checkpoint: Path | None
    """Where a resumed run continues; None: from the start."""
    tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    """Held-out tasks; empty: no evaluation."""
    solve: Solve
    reward: RewardFunction | None
    progress: Progress


class TrainerEntry(NamedTuple):
    """A row of the table of trainers."""

    train: Callable[[Plan], None]
    """Trains until the last step; leaves store, metrics and checkpoints in the run's folder."""
    in_process: bool
    """Agents run in this process, so that ``solve`` and ``reward`` may be functions without an importable name."""
