"""Reports a run to Weights & Biases."""

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

PACKAGE = "wandb"

_EXIT_CODES: Mapping[RunState, int] = {"finished": 0, "failed": 1, "interrupted": 255}


class WandbTracker:
    """History by step, configuration, tags, summary, and an artifact with the run's files.

    wandb's own variables apply: ``WANDB_MODE``, ``WANDB_ENTITY``, ``WANDB_PROJECT`` (default: lightning-rl), ``WANDB_RUN_GROUP``.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._wandb: Any = import_module(PACKAGE)
        self._with_checkpoint = run.with_checkpoint
        identity = run.read_id("wandb")
        self._run: Any = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=identity,
            resume=None if identity is None else "allow",
            name=run.name,
            tags=list(run.tags),
            config=dict(run.config),
            dir=str(run.folder),
            # Not the process's current run, which may be the user's own; and the console is the progress display's.
            reinit="create_new",
            # wandb prompts for a key on a terminal, where nobody may answer.
            settings=self._wandb.Settings(console="off", login_timeout=60),
        )
        run.keep_id("wandb", self._run.id)
        # wandb's own step only rises, but a resumed run may repeat steps, and an evaluation belongs to the step before it.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({**finite(metrics), "step": step})

    def on_evaluation(self, step: int, phase: Phase, evaluation: Evaluation) -> None:
        self._run.log({**evaluation_values(evaluation), "step": step})

    def on_end(self, state: RunState, result: Result | None) -> None:
        try:
            self._run.summary["state"] = state
            if result is not None:
                self._run.summary.update(summary_values(result))
                self._run.log({"curve": self._wandb.Image(str(result.folder / "curve.png"))})
                self._log_artifact(result)
        finally:
            self._run.finish(exit_code=_EXIT_CODES[state])

    def _log_artifact(self, result: Result) -> None:
        artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
        for path in artifacts(result.folder):
            artifact.add_file(str(path), name=path.name)
        if self._with_checkpoint:
            for name, path in checkpoint_files(result.checkpoint).items():
                artifact.add_file(str(path), name=f"{result.checkpoint.name}/{name}")
        self._run.log_artifact(artifact)


TRACKER = WandbTracker
