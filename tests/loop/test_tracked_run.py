"""A training run is reported while it trains, and continued when it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_core import fit, load_config
from lightning_core.errors import MissingExtra
from lightning_core.loop import evaluate
from lightning_core.observers.trackers import wandb
from lightning_core.records.run_folder.runs import read_run
from tests.bandit_runs import settings
from tests.observers.recording_tracker import reported
from tests.tiny_model import make_tiny_model

TRACKERS = ["tests.observers.recording_tracker:RecordingTracker", "tests.observers.recording_tracker:unreachable"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_metrics_evaluations_and_the_end_are_reported(model: Path, tmp_path: Path) -> None:
    run = {"report_to": TRACKERS, "tags": ["demo"]}
    held_out = {"source": "tests.bandit:tasks", "args": {"count": 2, "start": 100}}
    few: dict[str, Any] = {"rollouts": {"tasks_per_step": 2, "group_size": 4}, "tasks": {"eval": held_out}}
    result = fit(config=load_config(settings(model, tmp_path, trainer={"steps": 2}, eval={"every": 1}, run=run, **few)))
    resumed = {**run, "resume": True}
    result = fit(config=load_config(settings(model, tmp_path, trainer={"steps": 3}, run=resumed, **few)))
    own = load_config(settings(model, tmp_path, run=run, **few))
    evaluate(config=own, folder=result.folder, checkpoint=result.checkpoint)
    lines = reported(result.folder)
    assert [line[:3] if line[0] == "evaluation" else line[:2] for line in lines] == [
        ["start", "run"],
        ["evaluation", 0, "eval_before"],
        ["step", 1],
        ["evaluation", 1, "eval"],
        ["step", 2],
        ["evaluation", 2, "eval_after"],
        ["end", "finished"],
        ["start", "run"],
        ["step", 3],
        ["evaluation", 3, "eval_after"],
        ["end", "finished"],
    ]
    info = read_run(result.folder)
    assert info.tags == ("demo",)
    steps = [line[2] for line in lines if line[0] == "step"]
    assert steps == [{k: v for k, v in metrics.items() if k != "step"} for metrics in info.metrics]


def test_a_missing_package_is_an_error_before_the_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "PACKAGE", "no_such_package")
    with pytest.raises(MissingExtra):
        fit(config=load_config(settings(tmp_path / "model", tmp_path / "runs", run={"report_to": ["wandb"]})))
    assert not (tmp_path / "runs").exists()
