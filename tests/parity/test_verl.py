"""Losses, aggregations, importance weights and penalties against verl's own functions. See ``make test-parity``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import verl.utils.torch_functional as verl_F
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

from lightning_core.config.algorithm import Algorithm, Importance, Kl
from lightning_core.trainers.torch.penalties import kl_penalty, place_entropy
from tests.parity.batch import Step, assert_same, make_step, our_loss

AGGREGATIONS: list[tuple[dict[str, Any], str]] = [
    ({"aggregation": "sequence-mean", "sequence": "row"}, "seq-mean-token-mean"),
    ({"aggregation": "token-mean"}, "token-mean"),
    ({"aggregation": "constant", "constant_tokens": 20}, "seq-mean-token-sum-norm"),
]
# Our loss, verl's name for it, its dual clip: verl's PPO always has one.
LOSSES: list[tuple[dict[str, Any], str, float]] = [
    ({"loss": "ppo", "clip_low": 0.2, "clip_high": 0.3}, "vanilla", 1e9),
    ({"loss": "dual-clip", "clip_low": 0.2, "clip_high": 0.3, "clip_dual": 1.4}, "vanilla", 1.4),
    ({"loss": "gspo", "sequence": "row", "clip_low": 0.1, "clip_high": 0.15}, "gspo", 3.0),
    ({"loss": "cispo", "clip_low": 0.2, "clip_high": 0.3}, "cispo", 3.0),
    ({"loss": "reinforce"}, "reinforce", 3.0),
]
IMPORTANCE: list[tuple[Importance | None, str, str]] = [
    (None, "", ""),
    (Importance(high=1.5), "token", "1.5"),
    (Importance(level="row", high=1.5), "sequence", "1.5"),
    (Importance(kind="mask", low=0.7, high=1.5), "token", "0.7_1.5"),
    (Importance(kind="mask", level="row", low=0.2, high=5.0), "sequence", "0.2_5.0"),
]


def verl_loss(
    step: Step, algorithm: Algorithm, name: str, dual: float, mode: str, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=algorithm.clip_low,
        clip_ratio_high=algorithm.clip_high,
        clip_ratio_c=dual,
        global_batch_info={"loss_scale_factor": algorithm.constant_tokens},
    )
    new = step.new.clone().requires_grad_()
    old = step.sampled if algorithm.importance is None else step.proximal
    function: Callable[..., tuple[Tensor, Any]] = (
        core_algos.compute_policy_loss_reinforce if name == "reinforce" else core_algos.get_policy_loss_fn(name)
    )
    loss, _ = function(old, new, step.advantages, step.mask, mode, config, rollout_is_weights=weights)
    if algorithm.kl is not None:
        estimator = {"k1": "k1+", "k3": "low_var_kl"}[algorithm.kl.estimator]
        kl = core_algos.kl_penalty(new, step.reference, estimator)
        loss = loss + algorithm.kl.weight * core_algos.agg_loss(kl, step.mask, mode, **config.global_batch_info)
    if algorithm.entropy_weight:
        entropy = core_algos.agg_loss(step.entropy, step.mask, mode, **config.global_batch_info)
        loss = loss - algorithm.entropy_weight * entropy
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad


@pytest.mark.parametrize(("importance", "level", "threshold"), IMPORTANCE, ids=lambda value: str(value))
@pytest.mark.parametrize(("aggregation", "mode"), AGGREGATIONS, ids=lambda value: str(value))
@pytest.mark.parametrize(("loss", "name", "dual"), LOSSES, ids=lambda value: str(value))
@pytest.mark.parametrize("seed", range(3))
def test_losses(
    loss: dict[str, Any],
    name: str,
    dual: float,
    aggregation: dict[str, Any],
    mode: str,
    importance: Importance | None,
    level: str,
    threshold: str,
    seed: int,
) -> None:
    step = make_step(seed)
    algorithm = Algorithm(**{**loss, **aggregation}, importance=importance)
    weights = None
    if importance is not None:
        weights, metrics = compute_rollout_correction_weights(
            step.proximal - step.sampled, step.mask, rollout_is=level, rollout_is_threshold=threshold
        )
        outside = metrics["rollout_is_ratio_fraction_high"] + metrics["rollout_is_ratio_fraction_low"]
        assert outside > 0, "some tokens exceed the bounds"
    assert_same(our_loss(step, algorithm), verl_loss(step, algorithm, name, dual, mode, weights))


@pytest.mark.parametrize("importance", [None, Importance(high=1.5)], ids=["", "importance"])
@pytest.mark.parametrize(
    ("loss", "name", "clips"),
    [("dppo-tv", "dppo_tv", (0.005, 0.006)), ("examples.rules.losses:dppo_kl", "dppo_kl", (0.001, 0.002))],
)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_dppo(
    loss: str, name: str, clips: tuple[float, float], importance: Importance | None, seed: int
) -> None:
    """verl's loss is −sg[r] A log policy: another value, with the same gradient."""
    step = make_step(seed)
    # Below 0, so that these are logarithms of probabilities.
    step = replace(step, **{key: getattr(step, key) - 3 for key in ("sampled", "proximal", "new")})
    algorithm = Algorithm(
        loss=loss, clip_low=clips[0], clip_high=clips[1], aggregation="token-mean", importance=importance
    )
    weights = None
    if importance is not None:
        weights, _ = compute_rollout_correction_weights(
            step.proximal - step.sampled, step.mask, rollout_is="token", rollout_is_threshold="1.5"
        )
    _, found = our_loss(step, algorithm)
    _, expected = verl_loss(step, algorithm, name, 1e9, "token-mean", weights)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    masked = int(((found == 0) & step.mask.bool()).sum())
    assert 0 < masked < int(step.mask.sum()) / 2, "some tokens exceed the bounds"


@pytest.mark.parametrize(("aggregation", "mode"), AGGREGATIONS, ids=lambda value: str(value))
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_penalties_in_the_loss(estimator: str, aggregation: dict[str, Any], mode: str) -> None:
    step = make_step()
    kl = Kl(weight=0.5, estimator=estimator)  # type: ignore[arg-type]
    algorithm = Algorithm(**aggregation, kl=kl, entropy_weight=0.3)
    assert_same(our_loss(step, algorithm), verl_loss(step, algorithm, "vanilla", 1e9, mode, None))


@pytest.mark.parametrize(("estimator", "theirs"), [("k1", "k1+"), ("k3", "k3")])
def test_kl_estimators(estimator: str, theirs: str) -> None:
    step = make_step()
    a, b = step.new.clone().requires_grad_(), step.new.clone().requires_grad_()
    found, expected = kl_penalty(a, step.reference, estimator), core_algos.kl_penalty(b, step.reference, theirs)  # type: ignore[arg-type]
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(a.grad, b.grad)


def test_entropy_of_logits() -> None:
    logits = 3 * torch.randn(5, 31, generator=torch.Generator().manual_seed(0))
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, expected = place_entropy(a, torch.ones(5)), verl_F.entropy_from_logits(b)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(a.grad, b.grad)
