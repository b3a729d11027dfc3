"""Losses against TRL's `GRPOTrainer._compute_loss`, on a stand-in for the trainer that only has its settings. See ``make test-parity``.

TRL computes its importance weights inside the function that samples, which cannot be called alone. The tests pass them in, and compare them
with verl's (``test_verl.py``).
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from lightning_core.config.algorithm import Algorithm, Importance, Kl
from lightning_core.trainers.torch.corrections import importance_weights
from tests.parity.batch import B, Step, T, assert_same, make_step, our_loss

ROWS: dict[str, Any] = {"aggregation": "sequence-mean", "sequence": "row"}
CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
EPSILONS: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.3}
# Our settings, and TRL's.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({**ROWS, **CLIP}, {"loss_type": "grpo", **EPSILONS}),
    "dapo": ({"aggregation": "token-mean", **CLIP}, {"loss_type": "dapo", **EPSILONS}),
    "bnpo": ({"aggregation": "token-mean", **CLIP}, {"loss_type": "bnpo", **EPSILONS}),
    "dr_grpo": ({"aggregation": "constant", "constant_tokens": 20, **CLIP}, {"loss_type": "dr_grpo", **EPSILONS}),
    "two-sided": (
        {"loss": "dual-clip", "clip_dual": 1.4, **ROWS, **CLIP},
        {"loss_type": "grpo", "delta": 1.4, **EPSILONS},
    ),
    "gspo": (
        {"loss": "gspo", **ROWS, "clip_low": 0.1, "clip_high": 0.15},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    ),
    # TRL's epsilon_high is the bound itself; it has no lower bound.
    "cispo": (
        {"loss": "cispo", "aggregation": "token-mean", "clip_low": 1.0, "clip_high": 0.3},
        {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.3},
    ),
}


def trl_loss(
    step: Step, settings: dict[str, Any], old: Tensor, weights: Tensor | None, kl: float, entropy: float
) -> tuple[Tensor, Tensor]:
    new = step.new.clone().requires_grad_()
    arguments = {"delta": settings.get("delta"), "use_bias_correction_kl": False, "steps_per_generation": 1}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, step.entropy, None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=entropy > 0,
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(**arguments),
        aux_loss_enabled=False,
        beta=kl,
        current_gradient_accumulation_steps=1,
        entropy_coef=entropy,
        epsilon_high=settings["epsilon_high"],
        epsilon_low=settings["epsilon_low"],
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        loss_type=settings["loss_type"],
        max_completion_length=20,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
    )
    ids = torch.zeros(B, T, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": ids,
        "completion_mask": torch.ones(B, T),
        "tool_mask": step.mask,
        "advantages": step.advantages[:, 0],
        "old_per_token_logps": old,
        "ref_per_token_logps": step.reference,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": step.mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_losses(name: str, seed: int) -> None:
    step = make_step(seed)
    ours, theirs = CASES[name]
    assert_same(our_loss(step, Algorithm(**ours)), trl_loss(step, theirs, step.sampled, None, 0.0, 0.0))


@pytest.mark.parametrize("kind", ["tis", "mask"])
# GSPO with a weight for each token: the same value, but here as in verl a token's weight scales its own gradient, while TRL's single
# ratio of the sequence spreads the mean of the weights over all tokens.
@pytest.mark.parametrize(
    ("name", "level"), [(n, level) for n in CASES for level in ("token", "row") if (n, level) != ("gspo", "token")]
)
def test_losses_with_importance_weights_and_kl(name: str, level: str, kind: str) -> None:
    step = make_step()
    ours, theirs = CASES[name]
    importance = Importance(kind=kind, level=level, low=0.7, high=1.5)  # type: ignore[arg-type]
    log_ratio = (step.proximal - step.sampled) * step.mask
    if level == "row":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    weights, outside = importance_weights(log_ratio, importance)
    assert outside.any()
    algorithm = Algorithm(**ours, importance=importance, kl=Kl(weight=0.5))
    assert_same(our_loss(step, algorithm), trl_loss(step, theirs, step.proximal, weights, 0.5, 0.0))


def test_entropy_bonus() -> None:
    """TRL's is always a mean over tokens."""
    step = make_step()
    ours, theirs = CASES["dapo"]
    algorithm = Algorithm(**ours, entropy_weight=0.3)
    assert_same(our_loss(step, algorithm), trl_loss(step, theirs, step.sampled, None, 0.0, 0.3))
