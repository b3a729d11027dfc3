"""Tasks that are sampled by their success rates, against computed numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_core import Config, load_config
from lightning_core.records.statistics.task_history import Tried, recent_attempts
from lightning_core.records.store import Phase, RolloutRecord, Status, Store
from lightning_core.rollouts.tasks import Task
from lightning_core.signals.curriculum.sampling import draw_tasks, sampling_probabilities, success_rate
from tests.rollouts.collected import Collected, ScriptedAgents, collect_step, open_scripted_signals

TASKS = [{"id": name} for name in "abcd"]
TRIED = {"a": Tried(8, 8), "b": Tried(8, 0), "c": Tried(8, 4)}
"""Always, never and sometimes solved; d was not tried."""


def config(**sections: Any) -> Config:
    base: dict[str, dict[str, Any]] = {
        "policy": {"model": "m"},
        "agents": {"train": ["writer"]},
        "tasks": {"sampling": "curriculum"},
        "rollouts": {"tasks_per_step": 2, "group_size": 2},
    }
    return load_config({key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}})


def test_success_rates() -> None:
    rates = [success_rate(TRIED.get(name)) for name in "abcd"]
    assert rates == pytest.approx([8.5 / 9, 0.5 / 9, 0.5, 0.5])


def test_probabilities_are_the_learnabilities_and_the_floor() -> None:
    """p(1 − p) is 4.25/81 if all or no attempts succeeded, and 1/4 if half did or none was made; their sum is 98/162."""
    total = 98 / 162
    expected = [4.25 / 81 / total, 4.25 / 81 / total, 0.25 / total, 0.25 / total]
    assert sampling_probabilities(TASKS, TRIED, 0.0) == pytest.approx(expected)
    assert sampling_probabilities(TASKS, TRIED, 0.2) == pytest.approx([0.8 * p + 0.05 for p in expected])
    assert sampling_probabilities(TASKS, TRIED, 1.0) == pytest.approx([0.25] * 4)


def test_tasks_are_drawn_with_their_probabilities_and_not_twice() -> None:
    probabilities = [0.1, 0.2, 0.3, 0.4]
    drawn = [draw_tasks(TASKS, probabilities, 2, seed=str(number)) for number in range(4000)]
    first = Counter(pair[0]["id"] for pair in drawn)
    assert [first[name] / 4000 for name in "abcd"] == pytest.approx(probabilities, abs=0.03)
    assert all(pair[0] != pair[1] for pair in drawn)
    after_d = Counter(pair[1]["id"] for pair in drawn if pair[0]["id"] == "d")
    assert after_d["c"] / after_d.total() == pytest.approx(0.3 / 0.6, abs=0.05)


def test_a_step_with_more_tasks_than_there_are_repeats_them_evenly() -> None:
    drawn = draw_tasks(TASKS, [0.25] * 4, 10, seed="s")
    assert sorted(Counter(task["id"] for task in drawn).values()) == [2, 2, 3, 3]


def test_it_is_the_default_where_the_trainer_supports_it(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        torch = {"tasks": {"sampling": "auto"}}
        (automatic,) = open_scripted_signals(config(**torch), ScriptedAgents(), store)
        assert automatic.notes() == [
            "auto: tasks.sampling is curriculum: tasks that are sometimes solved are drawn more often"
        ]
        (chosen,) = open_scripted_signals(config(), ScriptedAgents(), store)
        assert not chosen.notes()
        assert len(open_scripted_signals(load_config({"policy": {"model": "m"}}), ScriptedAgents(), store)) == 1
        assert not open_scripted_signals(config(**torch, trainer={"name": "verl"}), ScriptedAgents(), store)
        assert not open_scripted_signals(config(tasks={"sampling": "uniform"}), ScriptedAgents(), store)


def test_the_picks_depend_on_seed_step_and_attempts_alone(tmp_path: Path) -> None:
    many = [{"id": f"t{i}"} for i in range(50)]
    settings = config(rollouts={"tasks_per_step": 5})

    def pick(settings: Config, step: int, tried: Mapping[str, Tried]) -> Sequence[Task] | None:
        """Those of a run with the attempts ``tried``."""
        with Store(tmp_path / f"{len(list(tmp_path.iterdir()))}.db") as store:
            attempts = [(task, float(i < own.solved)) for task, own in tried.items() for i in range(own.attempts)]
            store.add_rollouts(
                [(record(i, task, 0, reward, "ok", "train"), ()) for i, (task, reward) in enumerate(attempts)]
            )
            (curriculum,) = open_scripted_signals(settings, ScriptedAgents(), store)
            return curriculum.pick_tasks(many, step)

    picked = pick(settings, 3, {"t0": Tried(4, 2)})
    assert picked is not None
    assert pick(settings, 3, {"t0": Tried(4, 2)}) == picked
    assert pick(settings, 4, {"t0": Tried(4, 2)}) != picked
    assert pick(config(rollouts={"tasks_per_step": 5}, run={"seed": 7}), 3, {"t0": Tried(4, 2)}) != picked
    assert pick(settings, 3, {task["id"]: Tried(1000, 1000) for task in picked}) != picked


def record(number: int, task: str, step: int, reward: float | None, status: Status, phase: Phase) -> RolloutRecord:
    return RolloutRecord(
        id=f"{number:032x}",
        step=step,
        task_id=task,
        phase=phase,
        attempt=0,
        status=status,
        reward=reward,
        error=None,
        version=0,
        started_ns=0,
        ended_ns=1,
    )


def test_the_recent_attempts_are_those_of_the_last_two_steps_that_tried_the_task(tmp_path: Path) -> None:
    rows: list[tuple[str, int, float | None, Status, Phase]] = [
        ("a", 1, 1.0, "ok", "train"),
        ("a", 2, 1.0, "ok", "train"),
        ("a", 2, 0.3, "ok", "train"),
        ("a", 5, 0.7, "ok", "train"),
        ("a", 5, None, "infrastructure", "train"),
        ("a", 6, None, "invalid", "train"),
        ("a", 8, 1.0, "ok", "train"),
        ("b", 4, 0.0, "failed", "train"),
        ("b", 4, None, "ok", "train"),
        ("c", 4, 1.0, "ok", "eval"),
    ]
    with Store(tmp_path / "store.db") as store:
        store.add_rollouts([(record(i, *row), ()) for i, row in enumerate(rows)])
        assert recent_attempts(store, until=7, solved=0.7) == {"a": Tried(3, 2), "b": Tried(2, 0)}
        assert recent_attempts(store, until=8, solved=1.0) == {"a": Tried(2, 1), "b": Tried(2, 0)}
        assert recent_attempts(store, until=0, solved=1.0) == {}


def run(folder: Path, settings: Config, steps: int) -> tuple[list[list[str]], list[Collected]]:
    """The task ids and the data of each step. Only attempts at a and b can succeed: all at a, half of those at b."""
    agents = ScriptedAgents(reward=lambda task, copy: float(task == "a" or (task == "b" and copy % 2 == 0)))
    # Each step is collected anew: nothing is remembered but the folder.
    collected = [collect_step(settings, agents, folder, TASKS, step=step) for step in range(steps)]
    with Store(folder / "store.db", read_only=True) as store:
        picked = [sorted({r.task_id for r in store.rollouts(step=step)}) for step in range(1, steps + 1)]
    return picked, collected


def test_tasks_that_are_sometimes_solved_are_picked_most_often(tmp_path: Path) -> None:
    settings = config(rollouts={"tasks_per_step": 1, "group_size": 8})
    picked, collected = run(tmp_path, settings, 60)
    found = Counter(task for step in picked for task in step)
    assert found.keys() == set("abcd"), "no task is left out"
    assert found["b"] > 60 / 2
    assert found["b"] > 2 * max(found[name] for name in "acd")
    first, last = collected[0].metrics, collected[-1].metrics
    assert (first["tasks_sampled_success"], first["tasks_sampled_new"]) == (0.5, 1)
    assert last["tasks_sampled_new"] == 0
    assert not {"tasks_sampled", "tasks_sampled_success_sum"} & last.keys()


def test_the_success_of_the_picked_tasks_is_a_metric(tmp_path: Path) -> None:
    """All four tasks twice: rates of 1/2 at first, then 2.5/3, 1/2, and 0.5/3 twice."""
    _, collected = run(tmp_path, config(rollouts={"tasks_per_step": 4}), 2)
    metrics = [step.metrics for step in collected]
    assert [m["tasks_sampled_new"] for m in metrics] == [4, 0]
    assert [m["tasks_sampled_success"] for m in metrics] == pytest.approx([0.5, (2.5 / 3 + 1.5 / 3 + 0.5 / 3 * 2) / 4])


def test_uniform_sampling_passes_over_all_tasks_and_reads_no_attempts(tmp_path: Path) -> None:
    picked, collected = run(tmp_path, config(tasks={"sampling": "uniform"}), 4)
    assert sorted(picked[0] + picked[1]) == sorted(picked[2] + picked[3]) == list("abcd")
    assert "tasks_sampled_new" not in collected[0].metrics
