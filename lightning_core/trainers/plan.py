"""The input of every trainer: one run to make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_core.config import Config
from lightning_core.observers.progress import Progress
from lightning_core.records.results import Evaluation
from lightning_core.records.store import Phase
from lightning_core.rollouts.runner import RewardFunction, Solve, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run: configuration, tasks, agent, and the folder to write to."""

    config: Config
    folder: Path
    """The run's folder."""
    checkpoint: Path | None
    """The checkpoint that a resumed run continues from; None for a new run."""
    tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    """Held-out tasks. If empty, nothing is evaluated."""
    solve: Solve
    reward: RewardFunction | None
    progress: Progress
    on_step: Callable[[int, Mapping[str, Any]], None] = lambda step, metrics: None
    """Called after each update with its number, from 1, and the metrics of its line in ``metrics.jsonl``."""
    on_evaluation: Callable[[int, Phase, Evaluation], None] = lambda step, phase, evaluation: None
    """Called after each held-out evaluation with the number of updates before it."""


class TrainerEntry(NamedTuple):
    """An entry of the table of trainers."""

    train: Callable[[Plan], None]
    """Trains until the last step. Writes store, metrics and checkpoints to the run's folder."""
    in_process: bool
    """Whether agents run in this process.

    If so, ``solve`` and ``reward`` need no importable name.
    """
