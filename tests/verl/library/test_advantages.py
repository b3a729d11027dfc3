"""Advantages in verl's driver are bit for bit those of the rows, with their weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_core import Row
from lightning_core.config.algorithm import Algorithm, Importance
from lightning_core.trainers.torch.aggregation import token_weights
from tests.verl.library.trainer import VerlTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and verl's


@pytest.mark.parametrize("importance", [None, Importance()], ids=["ratio", "importance"])
@pytest.mark.parametrize(
    "aggregation",
    [
        {"aggregation": "rollout-mean"},
        {"aggregation": "sequence-mean", "sequence": "row"},
        {"aggregation": "sequence-mean", "sequence": "rollout"},
        {"aggregation": "sequence-mean", "sequence": "call"},
        {"aggregation": "token-mean"},
        {"aggregation": "constant", "constant_tokens": 20},
    ],
    ids=str,
)
def test_advantages(
    verl_trainer: VerlTrainer, rows: list[Row], aggregation: dict[str, Any], importance: Importance | None
) -> None:
    algorithm = Algorithm(**aggregation, importance=importance)
    batch = verl_trainer.prepare(rows, algorithm, multiple=10)
    fields = verl_trainer.fields(batch)
    padding = [key.startswith("pad") for key in batch.keys]
    assert padding == [False] * len(rows) + [True] * 3
    weights = token_weights(rows, algorithm)
    for row, weights_L, returns, advantages in zip(
        rows, weights, fields["returns"], fields["advantages"], strict=False
    ):
        assert row.advantages is not None
        start = int(row.mask.argmax())
        np.testing.assert_array_equal(returns.numpy(), row.advantages[start:])
        np.testing.assert_array_equal(advantages.numpy(), (weights_L * row.advantages)[start:])
    for name in ("returns", "advantages"):
        assert all(torch.equal(values, torch.zeros(1)) for values in fields[name].unbind()[len(rows) :])
