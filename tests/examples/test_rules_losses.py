"""The losses of examples/rules, named as module:callable, against hand-computed numbers and in the trainer's objective."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_core import load_config
from lightning_core.config.build_rules import check_rules, checked_loss
from lightning_core.credit import TokenLosses
from lightning_core.errors import ConfigError
from tests.trainers.test_losses import check_masked

pytestmark = pytest.mark.numeric


def loss_of(name: str) -> Callable[..., TokenLosses]:
    clips = {"clip_low": 0.05, "clip_high": 0.05} if name == "dppo_kl" else {}
    config = load_config({"policy": {"model": "m"}, "algorithm": {"loss": f"examples.rules.losses:{name}", **clips}})
    return checked_loss(config.algorithm).function


@pytest.mark.parametrize(
    ("low", "high", "masked"),
    [
        # The divergences: 0.5 ln(0.5/0.7) + 0.5 ln(0.5/0.3) = 0.0872, 0.01 ln(1/3) + 0.99 ln(0.99/0.97) = 0.0092,
        # 0.9 ln(0.9/0.7) + 0.1 ln(0.1/0.3) = 0.1163, 0.99 ln(0.99/0.9) + 0.01 ln(0.01/0.1) = 0.0713
        (0.05, 0.05, [0, 5, 7]),
        (0.08, 0.09, [5]),
        (0.12, 0.005, [0, 2]),
    ],
)
def test_dppo_kl_masks_by_the_divergence_of_the_sampled_token(low: float, high: float, masked: list[int]) -> None:
    check_masked(loss_of("dppo_kl"), masked, clip_low=low, clip_high=high)


def test_dppo_kl_is_finite_at_probabilities_of_0_and_1() -> None:
    old, new = torch.tensor([0.0, -1e-9, -60.0]), torch.tensor([-1e-9, -40.0, 0.0])
    for sign in (1.0, -1.0):
        found = loss_of("dppo_kl")(new, new - old, torch.full((3,), sign), clip_low=0.05, clip_high=0.05)
        assert [mark.any().item() for mark in found.marks.values()] == [sign > 0, sign < 0]


@pytest.mark.parametrize(
    ("threshold", "masked"),
    [
        # The tokens that could be clipped have (log r)² = 0.01, 0.04, 0.09, 0.25: the means of the smallest are 0.01,
        # 0.025, 0.0467 and 0.0975.
        (0.1, []),
        (0.05, [5]),
        (0.04, [2, 5]),
        (0.02, [1, 2, 5]),
        (0.005, [0, 1, 2, 5]),
    ],
)
def test_m2po_masks_the_fewest_tokens_that_could_be_clipped(threshold: float, masked: list[int]) -> None:
    drift = torch.tensor([0.1, 0.2, -0.3, 0.8, -0.9, 0.5, 2.0])
    advantages = torch.tensor([1.0, 2.0, -1.0, -1.0, 3.0, 1.0, 0.0])
    new = torch.full((7,), -1.0).requires_grad_()
    found = loss_of("m2po")(new, new - (-1 - drift), advantages, threshold=threshold)
    expected = [
        0.0 if i in masked else -math.exp(d) * a
        for i, (d, a) in enumerate(zip(drift.tolist(), advantages.tolist(), strict=True))
    ]
    found.losses_E.sum().backward()
    assert found.losses_E.tolist() == pytest.approx(expected)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(expected)
    assert found.marks["clip_high_fraction"].nonzero().flatten().tolist() == [i for i in masked if i != 2]
    assert found.marks["clip_low_fraction"].nonzero().flatten().tolist() == [i for i in masked if i == 2]


def test_m2po_masks_equal_tokens_together_and_accepts_none() -> None:
    """Squares 0.01, 0.04 and 0.04 have the mean 0.03; without one of the equal ones it would be 0.025."""
    drift = torch.tensor([0.2, 0.1, 0.2])
    found = loss_of("m2po")(drift, drift, torch.ones(3), threshold=0.028)
    assert (found.losses_E == 0).tolist() == [True, False, True]
    assert (loss_of("m2po")(drift, drift, -torch.ones(3), threshold=0.001).losses_E != 0).all()


def test_their_arguments_are_those_of_the_configuration() -> None:
    def check(**algorithm: Any) -> None:
        check_rules(load_config({"policy": {"model": "m"}, "algorithm": algorithm}))

    check(loss="examples.rules.losses:m2po", loss_args={"threshold": 0.1})
    with pytest.raises(
        ConfigError, match=r"'dppo_kl' has no default for clip_low and clip_high; set both, such as clip_low: 0.05"
    ):
        check(loss="examples.rules.losses:dppo_kl")
    with pytest.raises(ConfigError, match=r"loss_args.threshold: found 0, expected greater than 0"):
        check(loss="examples.rules.losses:m2po", loss_args={"threshold": 0})
    with pytest.raises(ConfigError, match="clip_low: goes with loss: ppo"):
        check(loss="examples.rules.losses:m2po", clip_low=0.1)
