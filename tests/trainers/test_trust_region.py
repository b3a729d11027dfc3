"""`trainer.max_kl`: an update beyond the limit is the same update, scaled down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_core import Row
from lightning_core.model.source import load_model
from lightning_core.trainers.torch.trainer import TorchTrainer
from tests.trainers.rows import make_row
from tests.trainers.test_torch_trainer import make

pytestmark = pytest.mark.numeric


def rows(trainer: TorchTrainer) -> list[Row]:
    """Rows with the logprobs of the trainer's own policy."""
    made = [
        make_row(
            ([n, 5, 6], False), (range(n, n + 30), True), rollout=f"r{n}", advantage=(-1.0) ** n, logprobs=[0.0] * 30
        )
        for n in range(6)
    ]
    found: list[Row] = []
    for row, scores in zip(made, logprobs(trainer, made), strict=True):
        found.append(make_row(
            ([*row.token_ids[:3]], False), ([*row.token_ids[3:]], True), rollout=row.rollout,
            advantage=float(row.advantages[-1]), logprobs=scores.tolist(),
        ))  # fmt: skip
    return found


@torch.no_grad()
def logprobs(trainer: TorchTrainer, rows: list[Row]) -> list[np.ndarray[Any, Any]]:
    """Of the tokens after the third, by a model of its own with the same weights."""
    network: Any = load_model(Path(trainer.model.settings.model), torch.float32)
    network.load_state_dict(trainer.model.network.state_dict())
    found: list[np.ndarray[Any, Any]] = []
    for row in rows:
        ids = torch.tensor([[*map(int, row.token_ids)]])
        scores = network(ids).logits[0, 2:-1].float().log_softmax(-1)
        found.append(scores.gather(1, ids[0, 3:, None])[:, 0].numpy())
    return found


def weights(trainer: TorchTrainer) -> torch.Tensor:
    return torch.cat([master.detach().flatten().clone() for master in trainer.model.tuning.masters.values()])


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_large_update_is_scaled_down_to_the_limit(
    trainers: list[TorchTrainer], tiny_llama: Path, decay: float
) -> None:
    options = {"dtype": "float32", "learning_rate": 3e-3, "weight_decay": decay}
    whole, limited = make(trainers, tiny_llama, **options), make(trainers, tiny_llama, max_kl=0.02, **options)
    for _ in range(2):  # the second with other moments than the first
        for name, master in whole.model.tuning.masters.items():
            master.data.copy_(limited.model.tuning.masters[name])
        whole.model.tuning.publish()
        trained = rows(limited)
        start = weights(limited)
        assert "update_scale" not in whole.step(trained)
        metrics = limited.step(trained)
        scale = metrics["update_scale"]
        assert 0 < scale < 1
        after, before = logprobs(limited, trained), [row.logprobs[3:] for row in trained]
        d = np.concatenate(after) - np.concatenate(before)
        assert metrics["update_kl"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-2)
        assert 0.005 < metrics["update_kl"] <= 0.02
        torch.testing.assert_close(weights(limited) - start, scale * (weights(whole) - start), atol=2e-6, rtol=1e-3)


def test_a_small_update_is_not_changed(trainers: list[TorchTrainer], tiny_llama: Path) -> None:
    free, limited = (make(trainers, tiny_llama, learning_rate=1e-6, max_kl=limit) for limit in (None, 1.0))
    trained = rows(free)
    free.step(trained)
    assert limited.step(trained)["update_scale"] == 1
    assert torch.equal(weights(free), weights(limited))
