"""Real runs of a tiny model, a few seconds each."""

from __future__ import annotations

from pathlib import Path
from threading import Semaphore
from typing import Any

from lightning_core import fit, load_config
from tests import bandit
from tests.browser import hostile_agent
from tests.tiny_model import make_tiny_model
from tests.tools.export.runs import train


def make_runs(folder: Path) -> Path:
    """Write the runs that `conftest.runs` describes; returns their folder."""
    model, runs = make_tiny_model(folder / "model"), folder / "runs"
    train(runs, model, name="bandit", trainer={"steps": 4}, eval={"every": 2})
    train(runs, model, name="other", trainer={"steps": 4, "learning_rate": 1e-3}, eval={"every": 2})
    train(runs, model, name="two", policies={"first": {"agents": ["talker"]}, "second": {"agents": ["counter"]}})
    fit(
        hostile_agent.solve,
        config=load_config(settings(runs, model, name="hostile", steps=1, tasks="tests.browser.hostile_agent:tasks")),
    )
    return runs


def settings(runs: Path, model: Path, *, name: str, steps: int, tasks: str = "tests.bandit:tasks") -> dict[str, Any]:
    """A configuration of ``steps`` steps."""
    return {
        "tasks": {"train": tasks},
        "policy": {"model": str(model), "max_context": 512, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 2, "group_size": 4, "max_tokens": 6},
        "trainer": {"steps": steps, "learning_rate": 5e-3},
        "run": {"dir": str(runs), "name": name},
    }


class GatedRun:
    """A run whose steps wait until `allow` is called; `train` belongs in a thread of its own."""

    steps = 4

    def __init__(self, runs: Path, model: Path, name: str) -> None:
        self.name = name
        self._config = load_config(settings(runs, model, name=name, steps=self.steps))
        self._allowed = Semaphore(0)

    def train(self) -> None:
        fit(self._solve, config=self._config)

    def allow(self, steps: int) -> None:
        """Let the rollouts of so many steps begin."""
        rollouts = self._config.rollouts
        self._allowed.release(steps * rollouts.tasks_per_step * rollouts.group_size)

    def _solve(self, task: dict[str, Any]) -> float:
        self._allowed.acquire()
        return bandit.solve(task)
