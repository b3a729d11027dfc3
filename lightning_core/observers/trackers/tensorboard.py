"""Reports a run to TensorBoard: event files in the run's folder, under ``tensorboard/``.

tensorboardX writes them, not ``torch.utils.tensorboard``: that imports torch and the whole TensorBoard with its server, of which
a training machine needs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lightning_core.errors import redact_urls
from lightning_core.observers.trackers.tracker import TrackedRun
from lightning_core.observers.trackers.values import evaluation_values, finite, summary_values
from lightning_core.records.observer import RunState
from lightning_core.records.results import Evaluation, Result
from lightning_core.records.store import Phase

PACKAGE = "tensorboardX"


class TensorBoardTracker:
    """Scalars by step; the configuration and the tags as texts; the curve as an image."""

    def __init__(self, run: TrackedRun) -> None:
        self._step = run.steps_done
        self._writer: Any = import_module(PACKAGE).SummaryWriter(
            str(run.folder / "tensorboard"),
            # TensorBoard hides values that an interrupted process wrote for repeated steps.
            purge_step=run.steps_done + 1 if run.resumed else None,
            # The rest of a file's name is the machine and the second: not enough for a run that is resumed at once.
            filename_suffix=f".{run.steps_done:06d}",
        )
        if not run.resumed:
            config = redact_urls((run.folder / "config.yaml").read_text(encoding="utf-8"))
            self._writer.add_text("config", "".join(f"    {line}\n" for line in config.splitlines()))
            if run.tags:
                self._writer.add_text("tags", ", ".join(run.tags))

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._step = step
        self._add(finite(metrics))

    def on_evaluation(self, step: int, phase: Phase, evaluation: Evaluation) -> None:
        self._step = step
        self._add(evaluation_values(evaluation))

    def on_end(self, state: RunState, result: Result | None) -> None:
        try:
            self._writer.add_text("state", state, self._step)
            if result is not None:
                self._add(summary_values(result))
                curve = import_module("matplotlib.image").imread(result.folder / "curve.png")
                self._writer.add_image("curve", curve, self._step, dataformats="HWC")
        finally:
            self._writer.close()

    def _add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, self._step)
        self._writer.flush()


TRACKER = TensorBoardTracker
