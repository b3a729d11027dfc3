"""Monitors in real runs of a tiny model: messages, metrics, the end of a run, the summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_core import fit, load_config
from lightning_core.errors import ConfigError
from lightning_core.observers.monitors import alerts
from lightning_core.observers.open import make_observers
from lightning_core.observers.progress import SilentProgress
from lightning_core.records.report import read_metrics, read_summary
from lightning_core.records.statistics.held_out import held_out_by_task
from lightning_core.records.steps import StepLog
from lightning_core.records.store import Store
from tests import bandit
from tests.tiny_model import make_tiny_model

EQUAL = {"calls": 8, "calls_credited": 0, "groups": 2, "reward": 0.5}
DIFFERENT = {**EQUAL, "calls_credited": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class Messages(SilentProgress):
    """What a run prints about monitors, and about its end."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        if text.startswith(("monitor", "stopped")):
            self.texts.append(text)


def settings(model: Path, runs: Path, **sections: dict[str, Any]) -> Any:
    base: dict[str, dict[str, Any]] = {
        "policy": {"model": str(model), "max_context": 256, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 4, "executor": "task"},
        "trainer": {"steps": 4, "checkpoint_every": 0},
        "monitors": {"disable": ["truncation"], "args": {"no_gradient": {"steps": 2}}},
        "run": {"dir": str(runs), "name": "run"},
    }
    return load_config({key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}})


def constant(task: Mapping[str, Any]) -> float:
    bandit.talk(task["prompt"])
    return 0.5


def test_a_message_is_shown_when_a_monitor_starts_to_hold(tmp_path: Path) -> None:
    progress = Messages()
    config = settings(Path("m"), tmp_path)

    def open_log(store: Store, after: int) -> StepLog:
        return StepLog(tmp_path, store, observers, after=after)

    observers = make_observers(config, progress)
    with Store(tmp_path / "store.db") as store, observers.watching(config, tmp_path):
        log = open_log(store, 0)
        for step, metrics in enumerate([EQUAL, EQUAL, EQUAL, DIFFERENT, EQUAL, EQUAL], start=1):
            log.add(step, metrics)
        assert len(progress.texts) == 2
        log = open_log(store, 6)
        log.add(7, EQUAL)
        assert len(progress.texts) == 2, "a resumed run does not repeat it"
        assert list(store.steps()) == [1, 2, 3, 4, 5, 6, 7]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("monitor/no_gradient")] == [2, 3, 6, 7]
    assert [alert.step for alert in alerts(lines, {}) if alert.monitor == "no_gradient"] == [3, 7], (
        "by default three steps"
    )


def test_a_monitor_ends_a_run_with_evaluation_and_checkpoint(model: Path, tmp_path: Path) -> None:
    stopping = {"disable": ["truncation"], "args": {"no_gradient": {"steps": 2}}, "stop": ["no_gradient"]}

    def run(**sections: dict[str, Any]) -> list[str]:
        progress = Messages()
        config = settings(model, tmp_path, **{"monitors": stopping, **sections})
        fit(constant, config=config, tasks=bandit.tasks(4), eval_tasks=bandit.tasks(2, start=100), progress=progress)
        return progress.texts

    first = run()
    assert [text.partition(":")[0] for text in first] == ["monitor no_gradient", "stopped after step 2 of 4"]
    assert "stopped after step 2 of 4: monitor no_gradient: nothing was trained in the last 2 steps" in first[1]
    folder = tmp_path / "run"
    summary = read_summary(folder / "summary.json")
    assert (summary.steps, summary.eval is not None) == (2, True)
    assert summary.stopped is not None
    assert summary.stopped.startswith("monitor no_gradient: nothing was trained")
    assert (folder / "checkpoints" / "step-000002").is_dir()
    (monitor,) = summary.monitors
    assert (monitor.monitor, monitor.first_step, monitor.last_step, monitor.steps) == ("no_gradient", 2, 2, 1)

    resume = {"dir": str(tmp_path), "name": "run", "resume": True}
    assert [text.partition(":")[0] for text in run(run=resume)] == ["stopped after step 2 of 4"], "it stops again"
    assert run(run=resume, monitors={**stopping, "stop": []}) == [], "the monitor held already"
    summary = read_summary(folder / "summary.json")
    assert (summary.steps, summary.stopped) == (4, None)


def test_the_alerts_of_a_finished_run_are_those_in_its_metrics(model: Path, tmp_path: Path) -> None:
    config = settings(model, tmp_path, eval={"every": 2}, monitors={"disable": [], "args": {}})
    result = fit(bandit.solve, config=config, tasks=bandit.tasks(4), eval_tasks=bandit.tasks(8, start=100))
    with Store(result.folder / "store.db", read_only=True) as store:
        held_out = held_out_by_task(store)
    assert sorted(held_out) == [0, 2, 4]
    found = alerts(result.metrics, held_out)
    assert [(a.step, a.metric) for a in found] == [
        (line["step"], key) for line in result.metrics for key in line if key.startswith("monitor/")
    ]
    assert [(m.monitor, m.first_step) for m in result.summary.monitors] == [("truncation", 3)], "max_tokens is 4"


def test_a_function_that_is_not_a_monitor_ends_the_run_before_it_starts(model: Path, tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"add": ["tests.bandit:solve"]}
    with pytest.raises(ConfigError, match=r"the function solve.* cannot be one of the monitors"):
        fit(constant, config=settings(model, tmp_path, monitors=wrong), tasks=bandit.tasks(4))
    assert not (tmp_path / "run").exists()


def failing(task: Mapping[str, Any]) -> float:
    value = bandit.solve(dict(task))
    if task["id"] == "t1":
        raise RuntimeError("t1 never works")
    return 1.0 if task["id"] == "t100" else value


def test_the_summary_shows_solved_tasks_failures_and_answers(model: Path, tmp_path: Path) -> None:
    solve: Callable[[dict[str, Any]], float] = failing
    config = settings(model, tmp_path)
    result = fit(solve, config=config, tasks=bandit.tasks(2), eval_tasks=bandit.tasks(6, start=100))
    summary = read_summary(result.folder / "summary.json")
    assert summary == result.summary
    assert summary.solved is not None
    assert summary.solved.tasks == 6
    assert summary.solved.before >= 1
    assert (summary.rollouts_failed, summary.rollouts_left_out) == (8, 0)
    assert summary.first_errors == {"failed": "RuntimeError: t1 never works"}
    assert (summary.groups, summary.groups_wasted) == (8, sum(int(m["groups_equal"]) for m in result.metrics))
    assert summary.groups_wasted >= 4
    unchanged = next(a for a in summary.answers if a.change == "unchanged")
    assert (unchanged.task, unchanged.reward_before, unchanged.reward_after) == ("t100", 1.0, 1.0)
    with Store(result.folder / "store.db", read_only=True) as store:
        first = next(r for r in store.rollouts(phase="eval_before") if r.task_id == "t100")
        content = (store.trace(first.id).calls[-1].response or {})["content"]
    assert summary.distinct_answers is not None
    assert 1 <= summary.distinct_answers.after <= summary.distinct_answers.rollouts_after == 6
    assert unchanged.before is not None
    assert [c for c in unchanged.before if c.isascii()] == [
        c for c in " ".join(content.split()) if c.isascii() and c.isprintable()
    ]


def test_the_summary_compares_the_agent_with_its_best_constant_answer(model: Path, tmp_path: Path) -> None:
    def answer(task: Mapping[str, Any]) -> dict[str, Any]:
        bandit.talk(task["prompt"])
        return {"label": "yes"}

    def score(task: Mapping[str, Any], found: Mapping[str, Any]) -> float:
        return float(found == {"label": "yes"} and task["id"] != "t100")

    config = settings(model, tmp_path, trainer={"steps": 1})
    summary = fit(
        answer, config=config, reward=score, tasks=bandit.tasks(2), eval_tasks=bandit.tasks(6, start=100)
    ).summary
    constant = summary.constant_answer
    assert constant is not None
    assert (constant.answer, constant.source, constant.known) == ('{"label": "yes"}', "reward function", 6)
    assert (constant.reward, constant.lead) == (pytest.approx(5 / 6), 0)
    assert (summary.constant_answer_problem, summary.is_form_only) == (None, False), "there is no improvement"
    assert summary.tokens_trained == 0 < summary.tokens_sampled, "no row has a gradient"
    assert read_summary(tmp_path / "run" / "summary.json") == summary
