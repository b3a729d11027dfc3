"""Trackio's database holds the run."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from tests.trackers.reported import FILES, interrupt_run, make_folder, report_run, resume_run


def rows(folder: Path, query: str, *given: str) -> list[Any]:
    with sqlite3.connect(folder / "lightning-rl.db") as database:
        return database.execute(query, given).fetchall()


def history(folder: Path, run: str, key: str) -> list[tuple[int, Any]]:
    found = rows(folder, "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id", run)
    return [(step, values[key]) for step, text in found if key in (values := json.loads(text))]


def run_ids(folder: Path, name: str) -> list[str]:
    return [row[0] for row in rows(folder, "SELECT DISTINCT run_id FROM metrics WHERE run_name = ?", name)]


def test_metrics_configuration_and_artifacts_are_stored(home: Path, trackio_folder: Path):
    report_run(make_folder(home, "trackio"), "trackio")
    (run,) = run_ids(trackio_folder, "a-trackio")
    assert history(trackio_folder, run, "reward") == [(1, 0.25), (2, 0.5)]
    assert history(trackio_folder, run, "loss") == [(2, 0.125)], "NaN is left out"
    assert history(trackio_folder, run, "sql/kl") == [(1, 0.5)]
    assert history(trackio_folder, run, "eval/reward") == [(0, 0.5), (2, 1.0)]
    assert history(trackio_folder, run, "summary/improvement") == [(2, 0.5)]
    (config,) = rows(trackio_folder, "SELECT config FROM configs WHERE run_id = ?", run)
    found = json.loads(config[0])
    assert (found["policy"]["model"], found["run"]["tags"]) == ("tiny", ["first try", "demo"])
    stored = {row[0]: row[1] for row in rows(trackio_folder, "SELECT name, type FROM artifacts")}
    assert stored == {f"a-trackio-{name}": "run" for name in FILES} | {"a-trackio-step-000002": "model"}
    (manifest,) = rows(
        trackio_folder,
        "SELECT manifest FROM artifact_versions WHERE artifact_id = (SELECT id FROM artifacts WHERE type = 'model')",
    )
    assert "adapter/adapter.safetensors" in manifest[0]
    assert "optimizer" not in manifest[0]


def test_a_resumed_run_continues_the_same_run(home: Path, trackio_folder: Path):
    folder = make_folder(home, "trackio").rename(home / "runs" / "interrupted")
    interrupt_run(folder, "trackio")
    resume_run(folder, "trackio")
    (run,) = run_ids(trackio_folder, "interrupted")
    steps = [step for step, _ in history(trackio_folder, run, "reward")]
    assert steps == [1, 2, 3, 3, 4], "Trackio keeps both values of a step that is repeated"
