"""Runs that keep their best checkpoint and end early."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_core import fit, load_config
from lightning_core.errors import ConfigError
from lightning_core.records.checkpoints import best_checkpoint, checkpoints
from lightning_core.records.progress import SilentProgress
from lightning_core.records.store import Store
from tests import bandit
from tests.test_loop import settings
from tests.tiny_model import make_tiny_model

pytestmark = pytest.mark.numeric
HELD_OUT = bandit.tasks(2, start=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def config(model: Path, runs: Path, **sections: dict[str, Any]) -> Any:
    base: dict[str, dict[str, Any]] = {
        "tasks": {"eval": None},
        "rollouts": {"tasks_per_step": 2, "group_size": 2},
        "trainer": {"steps": 6, "checkpoint_every": 0, "keep_checkpoints": 1},
        "eval": {"every": 1},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return load_config(settings(model, runs, **merged))


def scoring(rewards: Sequence[float]) -> Callable[[dict[str, Any]], float]:
    """The bandit, whose held-out reward is ``rewards``, one for each evaluation."""
    evaluations = Counter[str]()

    def solve(task: dict[str, Any]) -> float:
        value = bandit.solve(task)
        if task not in HELD_OUT:
            return value
        evaluations[task["id"]] += 1
        return rewards[evaluations[task["id"]] - 1]

    return solve


class Messages(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def summary(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_patience_ends_a_run_and_the_best_checkpoint_is_kept(model: Path, tmp_path: Path) -> None:
    """Before training 0.1; then 0.9, 0.3 and 0.2, which end the run after step 3; the last evaluation has 0.2 too."""
    own = config(model, tmp_path, trainer={"keep_best": True}, eval={"early_stop": {"patience": 2}})
    progress = Messages()
    fit(scoring([0.1, 0.9, 0.3, 0.2, 0.2]), config=own, eval_tasks=HELD_OUT, progress=progress)
    folder = tmp_path / "run"
    assert [path.name for path in checkpoints(folder)] == ["step-000001", "step-000003"]
    best = best_checkpoint(folder)
    assert best is not None
    assert best.name == "step-000001"
    reason = "the held-out reward has not risen above 0.900 for 2 evaluations (eval.early_stop.patience = 2)"
    assert [text for text in progress.texts if "stopped" in text] == [f"stopped after step 3 of 6: {reason}"]
    found = summary(folder)
    assert (found["steps"], found["stopped"], found["best_step"]) == (3, reason, 1)
    assert (found["eval_reward_before"], found["eval_reward_after"]) == (0.1, 0.2)
    with Store(folder / "store.db", read_only=True) as store:
        assert {record.step for record in store.rollouts(phase="eval_after")} == {3}


def test_a_new_best_replaces_the_old_one_and_a_stopped_run_stays_stopped(model: Path, tmp_path: Path) -> None:
    rule = {"early_stop": {"reward": 0.8}}
    own = config(model, tmp_path, trainer={"keep_best": True}, eval=rule)
    fit(scoring([0.1, 0.2, 0.3, 0.8, 0.7]), config=own, eval_tasks=HELD_OUT)
    folder = tmp_path / "run"
    assert [path.name for path in checkpoints(folder)] == ["step-000003"]
    again = config(model, tmp_path, trainer={"keep_best": True}, eval=rule, run={"resume": True})
    fit(scoring([0.7]), config=again, eval_tasks=HELD_OUT)
    found = summary(folder)
    assert (found["steps"], found["best_step"]) == (3, 3)
    assert found["stopped"] == "the held-out reward 0.800 reached eval.early_stop.reward = 0.8"


def test_without_held_out_tasks_both_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="require held-out tasks"):
        fit(bandit.solve, config=config(model, tmp_path, trainer={"keep_best": True}))
