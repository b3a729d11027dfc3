"""Shows a run on a progress display: its routes, steps, held-out rewards and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_core.config import Config
from lightning_core.errors import plural
from lightning_core.observers.early_stop import expected_steps
from lightning_core.observers.notebook import shown_progress
from lightning_core.observers.progress import Progress, SilentProgress
from lightning_core.records.observer import ObservedRun, Observer, RunState
from lightning_core.records.results import Evaluation, Recorded, Result
from lightning_core.records.store import Phase


class Display(Observer):
    """Shows a run on a `Progress`."""

    def __init__(self, config: Config, progress: Progress | bool | None) -> None:
        """``progress``: see `shown_progress`; one that is passed is not closed."""
        self._progress = progress
        self._shown: Progress = SilentProgress()
        self._limits = config.trainer

    def open(self, run: ObservedRun) -> None:
        self._steps = run.steps
        self._shown = shown_progress(self._progress)

    def start(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def phase(self, name: str, total: int | None = None) -> None:
        self._shown.phase(name, total)

    def advance(self, tokens: int) -> None:
        self._shown.advance(1, tokens)

    def message(self, text: str) -> None:
        self._shown.message(text)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._shown.step(step, expected_steps(self._steps, self._limits, self._recorded.lines), metrics)

    def on_evaluation(self, step: int, phase: Phase, evaluation: Evaluation) -> None:
        if phase != "eval_manual" and evaluation.reward is not None:
            self.message(f"held-out reward after {plural(step, 'step')}: {evaluation.reward:.3f}")

    def close(self, state: RunState, result: Result | None) -> None:
        if isinstance(self._progress, bool | None):
            self._shown.close()
