"""Saves the batches of verl's updates for tests to compare. Loaded by verl in the same way as the CPU platform."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import wrapt

FOLDER = "LIGHTNING_TEST_BATCHES"
FIELDS = (
    "prompts",
    "responses",
    "response_mask",
    "rm_scores",
    "rollout_log_probs",
    "advantages",
    "returns",
    "input_ids",
)


@wrapt.when_imported("verl.trainer.ppo.v1.trainer_base")
def _write_batches(module: Any) -> None:
    compute_advantage = module.PPOTrainer._compute_advantage

    def wrapped(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        found = compute_advantage(self, batch, metrics)
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
        rows = [
            {name: data[name][index].clone() for name in FIELDS} | {"key": key, "tag": dict(tag)}
            for index, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True))
        ]
        torch.save(rows, Path(os.environ[FOLDER]) / f"step-{self.global_steps}.pt")
        return found

    if FOLDER in os.environ:
        module.PPOTrainer._compute_advantage = wrapped
