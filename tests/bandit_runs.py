"""Runs of `tests.bandit` on a tiny model: their settings, and a script that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RUN = """
import sys
from lightning_core import fit, load_config
from lightning_core.capture import scope
from lightning_core.observers.progress import PlainProgress
fit(config=load_config(sys.argv[1], sys.argv[2:]), progress=PlainProgress(sys.stdout))
"""


def settings(model: Path, runs: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "tasks": {"train": "tests.bandit:tasks", "eval": "tests.bandit:held_out"},
        "policy": {"model": str(model), "max_context": 256, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 4, "group_size": 8, "max_tokens": 4, "temperature": 1.0, "executor": "task"},
        "trainer": {"steps": 12, "learning_rate": 5e-3, "checkpoint_every": 2},
        "run": {"dir": str(runs), "name": "run"},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return {"agent": "tests.bandit:solve", **merged}
