"""Reports a run to MLflow."""

from __future__ import annotations

import os
import time
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
    flat,
    summary_values,
)
from lightning_core.records.observer import RunState
from lightning_core.records.results import Evaluation, Result
from lightning_core.records.store import Phase

PACKAGE = "mlflow"

_STATES: Mapping[RunState, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_MAX_PARAM = 6000
"""Characters of a parameter's value that MLflow stores."""
_MAX_BATCH = 100
"""Parameters in one request."""


class MlflowTracker:
    """Metrics by step, the configuration as parameters, tags, and the run's files as artifacts.

    MLflow's own variables apply: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME`` (default: lightning-rl). Uses the client, not
    the fluent API, whose current run may be the user's own.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._entities: Any = import_module("mlflow.entities")
        self._client: Any = import_module(PACKAGE).MlflowClient()
        self._with_checkpoint = run.with_checkpoint
        self._step = run.steps_done
        identity = run.read_id("mlflow")
        if identity is not None:
            self._id = identity
            self._client.update_run(identity, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        created = self._client.create_run(experiment_id, run_name=run.name, tags=dict.fromkeys(run.tags, "true"))
        self._id: str = created.info.run_id
        try:
            self._log_params(flat(run.config))
        except BaseException:
            # The caller tries again with a new run.
            self._client.set_terminated(self._id, status="FAILED")
            raise
        run.keep_id("mlflow", self._id)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._step = step
        self._log(finite(metrics))

    def on_evaluation(self, step: int, phase: Phase, evaluation: Evaluation) -> None:
        self._step = step
        self._log(evaluation_values(evaluation))

    def on_end(self, state: RunState, result: Result | None) -> None:
        try:
            if result is not None:
                self._log(summary_values(result))
                for path in artifacts(result.folder):
                    self._client.log_artifact(self._id, str(path))
                if self._with_checkpoint:
                    self._log_checkpoint(result)
        finally:
            self._client.set_terminated(self._id, status=_STATES[state])

    def _log_params(self, config: Mapping[str, Any]) -> None:
        params = [self._entities.Param(key, str(value)[:_MAX_PARAM]) for key, value in config.items()]
        for start in range(0, len(params), _MAX_BATCH):
            self._client.log_batch(self._id, params=params[start : start + _MAX_BATCH])

    def _log_checkpoint(self, result: Result) -> None:
        for name, path in checkpoint_files(result.checkpoint).items():
            folder = f"{result.checkpoint.name}/{name}".rpartition("/")[0]
            self._client.log_artifact(self._id, str(path), artifact_path=folder)

    def _log(self, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, self._step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)


TRACKER = MlflowTracker
