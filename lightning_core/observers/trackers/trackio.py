"""Reports a run to Trackio."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lightning_core.observers.trackers.tracker import TrackedRun
from lightning_core.observers.trackers.values import (
    PROJECT,
    artifacts,
    checkpoint_files,
    evaluation_values,
    finite,
    summary_values,
)
from lightning_core.records.observer import RunState
from lightning_core.records.results import Evaluation, Result
from lightning_core.records.store import Phase

PACKAGE = "trackio"


class TrackioTracker:
    """Metrics by step, configuration, and the run's files as artifacts. Trackio has no tags: they are in the configuration.

    Trackio's own variables apply: ``TRACKIO_SPACE_ID``, ``TRACKIO_SERVER_URL``, ``TRACKIO_DIR``. ``TRACKIO_PROJECT`` (default:
    lightning-rl) names the project.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._trackio: Any = import_module(PACKAGE)
        # Trackio looks into this module at each metric, and drops the metric if another thread is in the middle of importing it.
        import_module("matplotlib.figure")
        self._with_checkpoint = run.with_checkpoint
        self._step = run.steps_done
        self._run: Any = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=run.name,
            config=dict(run.config),
            resume="allow" if run.resumed else "never",
            embed=False,
        )
        run.keep_id("trackio", self._run.name)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._log(step, finite(metrics))

    def on_evaluation(self, step: int, phase: Phase, evaluation: Evaluation) -> None:
        self._log(step, evaluation_values(evaluation))

    def on_end(self, state: RunState, result: Result | None) -> None:
        try:
            if result is not None:
                self._log(self._step, summary_values(result))
                for path in artifacts(result.folder):
                    self._run.log_artifact(path, name=f"{self._run.name}-{path.name}", type="run")
                if self._with_checkpoint:
                    self._log_checkpoint(result)
        finally:
            self._run.finish()

    def _log_checkpoint(self, result: Result) -> None:
        artifact = self._trackio.Artifact(f"{self._run.name}-{result.checkpoint.name}", type="model")
        for name, path in checkpoint_files(result.checkpoint).items():
            artifact.add_file(str(path), name=name)
        self._run.log_artifact(artifact)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(values), step=step)


TRACKER = TrackioTracker
