"""The loss against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_core.errors import TrainingError
from lightning_core.trainers.loss import policy_loss, token_weights
from tests.trainers.rows import make_row


def test_rollout_mean_divides_by_tokens_of_a_rollout_and_by_rollouts() -> None:
    """The example of arXiv 2608.17528, sec. on loss normalisation: A has rows of 50 and 100 tokens, B 3 of 30, C one of 40."""
    shape = {"A": [50, 100], "B": [30, 30, 30], "C": [40]}
    rows = [make_row(([1], False), ([2] * n, True), rollout=name) for name, counts in shape.items() for n in counts]
    weights = token_weights(rows, "rollout-mean")
    expected = [1 / 3 / 150, 1 / 3 / 150, 1 / 3 / 90, 1 / 3 / 90, 1 / 3 / 90, 1 / 3 / 40]
    for row, weight, value in zip(rows, weights, expected, strict=True):
        assert weight[row.mask] == pytest.approx(value)
        assert weight[~row.mask] == 0
    assert sum(w.sum() for w in weights) == pytest.approx(1)
    for row, weight in zip(rows, token_weights(rows, "token-mean"), strict=True):
        assert weight[row.mask] == pytest.approx(1 / 280)


def test_rows_without_tokens_do_not_count_as_rollouts() -> None:
    rows = [make_row(([1, 2], False), rollout="empty"), make_row(([1], False), ([2], True), rollout="full")]
    assert [w.sum() for w in token_weights(rows, "rollout-mean")] == [0, 1]
    with pytest.raises(TrainingError, match="has a sampled token"):
        token_weights(rows[:1], "rollout-mean")


def test_clipped_loss_by_hand() -> None:
    ratios = [1.0, 1.5, 1.5, 0.5, 0.5, 1.2]
    advantages = [2.0, 1.0, -1.0, 1.0, -1.0, 3.0]
    sampled = torch.full((6,), -1.0)
    logprobs = (torch.tensor(ratios).log() + sampled).requires_grad_()
    weights = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.2, 0.1])
    found = policy_loss(logprobs, sampled, torch.tensor(advantages), weights, clip_low=0.2, clip_high=0.28)
    # min(r A, clip(r, .8, 1.28) A):  2,  1.28 (clipped),  -1.5,  .5,  -.8 (clipped),  3.6
    terms = [2.0, 1.28, -1.5, 0.5, -0.8, 3.6]
    assert found.loss.item() == pytest.approx(-sum(w * t for w, t in zip(weights.tolist(), terms, strict=True)))
    found.loss.backward()
    # d/dlogprob = -w r A where the clip does not hold, 0 where it does
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.2, 0, 0.45, -0.05, 0, -0.36], abs=1e-6)
    assert found.sums["clip_high_fraction"] == 1
    assert found.sums["clip_low_fraction"] == 1
    assert found.maxima["ratio_max"] == pytest.approx(1.5)
    kl = sum(r - 1 - math.log(r) for r in ratios)
    assert found.sums["approx_kl"] == pytest.approx(kl, abs=1e-5)


def test_weights_are_float32() -> None:
    assert token_weights([make_row(([1], False), ([2], True))], "token-mean")[0].dtype == np.float32
