"""The summed loss against hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_core.config.algorithm import Algorithm, Kl
from lightning_core.credit import LOSSES
from lightning_core.trainers.torch.loss import TrainedTokens, policy_loss
from lightning_core.trainers.torch.objective import Objective
from lightning_core.trainers.torch.packing import pack_rows
from tests.trainers.rows import make_row

pytestmark = pytest.mark.numeric


def test_the_default_loss_against_computed_numbers() -> None:
    ratios = [1.0, 1.5, 1.5, 0.5, 0.5, 1.2]
    advantages = [2.0, 1.0, -1.0, 1.0, -1.0, 3.0]
    sampled = torch.full((6,), -1.0)
    logprobs = (torch.tensor(ratios).log() + sampled).requires_grad_()
    weights = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.2, 0.1])
    tokens = TrainedTokens(
        logprobs_E=logprobs,
        sampled_E=sampled,
        old_E=sampled,
        advantages_E=torch.tensor(advantages),
        weights_E=weights,
    )
    found = policy_loss(tokens, Algorithm(), LOSSES["ppo"])
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


def test_all_terms_together_against_computed_numbers() -> None:
    """Importance weights belong to the policy's loss, not to the penalties; token weights to all."""
    zero = torch.zeros(2)
    tokens = TrainedTokens(
        logprobs_E=torch.tensor([-1.0, -2.0]),
        sampled_E=zero,
        old_E=torch.tensor([-1.0, -2.0]),
        advantages_E=torch.tensor([1.0, -2.0]),
        weights_E=torch.tensor([0.25, 0.75]),
        importance_E=torch.tensor([2.0, 0.0]),
        outside_E=torch.tensor([False, True]),
        reference_E=torch.tensor([-1.5, -2.0]),
        entropy_E=torch.tensor([0.3, 0.7]),
    )
    found = policy_loss(tokens, Algorithm(kl=Kl(weight=0.1), entropy_weight=0.01), LOSSES["ppo"])
    k3 = math.exp(-0.5) - 1 + 0.5
    expected = 0.25 * (2 * -1.0 + 0.1 * k3 - 0.01 * 0.3) + 0.75 * (0 + 0 - 0.01 * 0.7)
    assert found.loss.item() == pytest.approx(expected)
    assert found.sums["importance_outside_fraction"] == 1
    assert found.sums["importance_mean"] == found.maxima["importance_max"] == 2
    assert found.sums["kl"] == pytest.approx(k3)
    assert found.sums["entropy"] == pytest.approx(1.0)


TURN_PPO = Algorithm(loss="gspo", sequence="call", aggregation="sequence-mean", clip_low=0.2, clip_high=0.3)


def test_the_ratio_and_the_clip_are_those_of_a_call() -> None:
    """Turn-PPO (2512.17008): three calls of two rows, each with its own advantage, ratio and clip."""
    rows = [
        make_row(
            ([1], False),
            ([2, 3], True),
            ([4], False),
            ([5], True),
            advantage=[2.0, 2.0, -1.0],
            logprobs=[-2.0, -2.0, -1.0],
        ),
        make_row(([1], False), ([6, 7], True), advantage=0.5, rollout="r1", logprobs=[-1.0, -1.0]),
    ]
    objective = Objective(TURN_PPO, rows, pack_rows(rows, range(2), budget=1), torch.device("cpu"))
    assert not objective.needs_all_logprobs(), "a call is in one row"
    # log r: 0.1 and 0.3, mean 0.2; −0.1; 0.6 and 0, mean 0.3, which is clipped to 1.3
    logprobs = [torch.tensor([-1.9, -1.7, -1.1]).requires_grad_(), torch.tensor([-0.4, -1.0]).requires_grad_()]
    found = [objective.loss(batch, own) for batch, own in enumerate(logprobs)]
    assert found[0].loss.item() == pytest.approx(-(2 * math.exp(0.2) - math.exp(-0.1)) / 3)
    assert found[1].loss.item() == pytest.approx(-0.5 * 1.3 / 3)
    for one in found:
        one.loss.backward()
    gradients = [own.grad.tolist() for own in logprobs if own.grad is not None]
    # −s A / 3 of a call, in equal parts for its tokens
    assert gradients[0] == pytest.approx([-math.exp(0.2) / 3, -math.exp(0.2) / 3, math.exp(-0.1) / 3])
    assert gradients[1] == [0, 0]
