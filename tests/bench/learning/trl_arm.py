"""The outside baseline: TRL's GRPOTrainer on the tasks, the model and the settings of a study with single responses."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_core import Config
from lightning_core.model.source import resolve_model
from lightning_core.rollouts.tasks import training_tasks
from tests.bench.engine import TRL
from tests.bench.environment import install
from tests.bench.learning.studies import ROOT

ARM = "TRL"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlRun:
    """What `train` returns: one entry for each step, and the weights."""

    tokens: list[int]
    rewards: list[float]
    seconds: list[float]
    weights: Path


def train(config: Config, folder: Path) -> TrlRun:
    """Train as ``config`` says, with TRL's own defaults where it says nothing; the weights are written to ``folder``."""
    python = install(
        TRL, "python", oldest=(3, 11), interpreter=None, beside=(f"torch=={torch.__version__.split('+')[0]}",)
    )
    rollouts, trainer = config.rollouts, config.trainer
    work: dict[str, Any] = {
        "model": str(resolve_model(str(config.policy.model))),
        "out": str(folder),
        "tasks": [{"question": task["question"], "answer": task["answer"]} for task in training_tasks(config)],
        "seed": config.run.seed,
        "budget": trainer.token_budget,
        "settings": {
            "tasks_per_step": rollouts.tasks_per_step,
            "group_size": rollouts.group_size,
            "max_tokens": rollouts.max_tokens,
            "temperature": rollouts.temperature,
            "learning_rate": trainer.learning_rate,
            "betas": trainer.betas,
            "layers": config.policy.train_layers,
        },
    }
    done = subprocess.run(
        [str(python), "-m", "tests.bench.learning.trl_run"],
        input=json.dumps(work),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return TrlRun(**json.loads(done.stdout.splitlines()[-1]), weights=folder)
