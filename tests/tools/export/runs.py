"""Short training runs, and the logprobs that their trainer and exported models give to the same tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_core import fit, load_config
from lightning_core.trainers.torch.factory import make_torch_trainer
from lightning_core.trainers.torch.multi_policy import MultiPolicyTrainer
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests import bandit, two_bandits
from tests.trainers.rows import make_row

TOLERANCE = 1e-4
"""Largest difference between two float32 logprobs of the same weights and tokens."""


FEW: dict[str, dict[str, Any]] = {"tasks": {"eval": None}, "rollouts": {"group_size": 4}}
"""The sections of `train` for a model that is slow on a CPU."""


def train(folder: Path, model: Path, *, name: str = "run", **sections: dict[str, Any]) -> Path:
    """The folder of a run of two steps on ``model``, with a checkpoint after each and held-out tasks."""
    defaults: dict[str, dict[str, Any]] = {
        "tasks": {"train": "tests.bandit:tasks", "eval": "tests.bandit:held_out"},
        "policy": {"model": str(model), "max_context": 256, "dtype": "float32"},
        "rollouts": {"tasks_per_step": 2, "group_size": 8, "max_tokens": 6, "executor": "task"},
        "trainer": {"steps": 2, "learning_rate": 5e-3, "checkpoint_every": 1},
        "run": {"dir": str(folder), "name": name},
    }
    config = {key: {**defaults.get(key, {}), **sections.get(key, {})} for key in {**defaults, **sections}}
    if "policies" in sections:
        config |= {"tasks": {"train": "tests.two_bandits:tasks"}, "credit": {"rewards": "explicit"}}
        return fit(two_bandits.solve, config=load_config(config)).folder
    return fit(bandit.solve, config=load_config(config)).folder


def sequences(vocabulary: int, *, count: int = 3, length: int = 60) -> list[list[int]]:
    """Random tokens."""
    rng = random.Random(0)
    return [rng.choices(range(vocabulary), k=length) for _ in range(count)]


def trainer_logprobs(run: Path, checkpoint: str, ids: list[list[int]], policy: str = "policy") -> list[NDArray[Any]]:
    """The logprob of each token but the first, from the trainer's own forward pass with the checkpoint's weights."""
    trainer: Any = make_torch_trainer(load_config(run / "config.yaml", ["policy.backend=torch"])).learner
    try:
        trainer.load(run / "checkpoints" / checkpoint, weights_only=True)
        own = trainer.policies[policy] if isinstance(trainer, MultiPolicyTrainer) else trainer
        assert isinstance(own, TorchTrainer)
        rows = [make_row((tokens[:1], False), (tokens[1:], True), rollout=str(i)) for i, tokens in enumerate(ids)]
        found: list[NDArray[Any]] = []
        for index in range(len(rows)):
            (batch,) = own.model.pack(rows, [index])
            with torch.no_grad(), own.model.tuning.active():
                found.append(own.model.forward.logprobs(batch, rows)[0].float().numpy())
        return found
    finally:
        trainer.close()


def model_logprobs(model: Any, ids: list[list[int]]) -> list[NDArray[Any]]:
    """The same from a Hugging Face model."""
    found: list[NDArray[Any]] = []
    for tokens in ids:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1].float()
        found.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy())
    return found


def difference(a: list[NDArray[Any]], b: list[NDArray[Any]]) -> float:
    """The largest difference."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))
