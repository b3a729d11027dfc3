"""Two runs are compared: settings that differ, and held-out rewards on the same tasks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_core import trace as tr
from lightning_core.records.run_folder.configs import config_differences
from lightning_core.records.store import Phase, Store
from lightning_core.tools.runs.compare import EvaluationPoint, TaskChange, held_out_difference
from lightning_core.trace import SpanRecord
from tests.records.test_store import record

Rewards = dict[str, list[float]]


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(d.key, dict(d.values)) for d in config_differences({"a": a, "b": b})]


def make_store(folder: Path, evaluations: Mapping[tuple[Phase, int], Rewards], text: str = "q") -> Path:
    """A run's folder with these rewards by phase, step and task."""
    folder.mkdir()
    with Store(folder / "store.db") as store:
        for (phase, step), rewards in evaluations.items():
            for task, values in rewards.items():
                for value in values:
                    identity = uuid.uuid4().hex
                    span = SpanRecord(
                        name="rollout", trace_id=identity, span_id="a" * 16, parent_id=None, start_ns=1, end_ns=2,
                        attributes={tr.TASK_ID: task, tr.TASK: json.dumps({"id": task, "text": text})},
                    )  # fmt: skip
                    store.add_rollout(record(identity, phase=phase, step=step, task_id=task, reward=value), [span])
    return folder


def same(reward: float, tasks: int = 8) -> Rewards:
    return {f"t{n}": [reward] for n in range(tasks)}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": {"y": 1}}, {"x": {"y": 1}}, []),
        ({"x": {"y": 1, "z": 2}}, {"x": {"y": 3, "z": 2}}, [("x.y", {"a": 1, "b": 3})]),
        ({"x": [1, 2]}, {"x": [1, 3]}, [("x", {"a": [1, 2], "b": [1, 3]})]),
        ({"x": 1}, {"x": True}, [("x", {"a": 1, "b": True})]),
        ({}, {"x": None}, [("x", {"b": None})]),
        ({"lora": None}, {"lora": {"rank": 8}}, [("lora.rank", {"b": 8})]),
        ({"policies": {}}, {"policies": {"sql": {"seed": 1}}}, [("policies.sql.seed", {"b": 1})]),
        ({"agent": "m:f"}, {"agent": {"command": ["x"]}}, [("agent", {"a": "m:f"}), ("agent.command", {"b": ["x"]})]),
        ({"run": {"name": "a", "seed": 0}}, {"run": {"name": "b", "seed": 1}}, [("run.seed", {"a": 0, "b": 1})]),
    ],
)
def test_only_keys_that_differ_are_listed(
    a: Mapping[str, Any], b: Mapping[str, Any], expected: list[tuple[str, dict[str, Any]]]
) -> None:
    assert differences(a, b) == expected


def test_any_number_of_configurations_is_compared() -> None:
    (found,) = config_differences({"a": {"x": 1, "y": 0}, "b": {"x": 1, "y": 0}, "c": {"x": 2, "y": 0}})
    assert (found.key, dict(found.values)) == ("x", {"a": 1, "b": 1, "c": 2})


def test_the_last_evaluations_are_compared_by_task(tmp_path: Path) -> None:
    a = make_store(
        tmp_path / "a", {("eval_before", 0): same(0.0), ("eval", 2): same(0.5), ("eval_after", 4): same(0.25)}
    )
    b = make_store(tmp_path / "b", {("eval_before", 0): same(0.0), ("eval", 2): same(0.5) | {"t3": [0.0, 0.5]}})
    found = held_out_difference(a, b)
    assert found is not None
    assert (found.first, found.second) == (
        EvaluationPoint(phase="eval_after", step=4),
        EvaluationPoint(phase="eval", step=2),
    )
    assert (found.tasks, found.not_compared) == (8, 0)
    assert (found.first_reward, found.second_reward) == (0.25, 0.46875)
    assert found.difference.mean == pytest.approx(0.21875)
    assert found.difference.low <= 0.21875 <= found.difference.high
    assert found.changes[-1] == TaskChange(task_id="t3", first=0.25, second=0.25)


def test_tasks_are_the_same_only_if_id_and_content_are(tmp_path: Path) -> None:
    a = make_store(tmp_path / "a", {("eval_after", 1): same(0.5)})
    more = make_store(tmp_path / "more", {("eval_after", 1): same(0.5, tasks=10)})
    other = make_store(tmp_path / "other", {("eval_after", 1): same(0.5)}, text="another question")
    found = held_out_difference(a, more)
    assert found is not None
    assert (found.tasks, found.not_compared) == (8, 2)
    assert held_out_difference(a, other) is None


def test_runs_without_evaluations_have_no_difference(tmp_path: Path) -> None:
    a = make_store(tmp_path / "a", {("eval_after", 1): same(0.5)})
    trained = make_store(tmp_path / "trained", {("train", 1): same(0.5)})
    (tmp_path / "empty").mkdir()
    assert held_out_difference(a, trained) is None
    assert held_out_difference(a, tmp_path / "empty") is None


def test_a_recorded_eval_counts_if_the_run_made_none(tmp_path: Path) -> None:
    a = make_store(tmp_path / "a", {("eval_manual", 0): same(0.5)})
    b = make_store(tmp_path / "b", {("eval_after", 3): same(1.0), ("eval_manual", 9): same(0.0)})
    found = held_out_difference(a, b)
    assert found is not None
    assert (found.first.phase, found.second.phase, found.difference.mean) == ("eval_manual", "eval_after", 0.5)
