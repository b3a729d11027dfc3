"""Limits an update's KL divergence from the policy before it: an update beyond the limit is scaled down.

A trust region with backtracking, as in TRPO (arXiv 1502.05477, appendix C), on the step of AdamW in place of the natural gradient.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_core.trainers.torch.forward import Forward
from lightning_core.trainers.torch.mini_batches import MiniBatch, Scaled
from lightning_core.trainers.torch.optimizer import MasterOptimizer

_MOST_TOKENS = 2048
"""About so many trained tokens are measured."""
_ATTEMPTS = 6
_SMALLEST_FACTOR = 0.1
_MARGIN = 0.9
"""The divergence grows a little less or more than with the square of the scale."""


@torch.no_grad()
def limit_divergence(
    optimizer: MasterOptimizer,
    forward: Forward,
    part: MiniBatch,
    logprobs_before: Sequence[Tensor],
    *,
    limit: float,
    seed: str,
) -> Scaled:
    """Scale the last update of ``optimizer``, on ``part``, down until its divergence is at most ``limit`` nats per trained token.

    ``logprobs_before``: float32 [E] of each micro-batch's trained tokens before the update. ``seed``: decides which micro-batches are
    measured if there are many. After `_ATTEMPTS` the last scale is kept.
    """
    measured = _some_batches(part, seed)
    scale, attempts = 1.0, 1
    while True:
        divergence = _divergence(forward, part, logprobs_before, measured)
        if divergence <= limit or attempts == _ATTEMPTS:
            return Scaled(scale, divergence)
        factor = _MARGIN * math.sqrt(limit / divergence) if math.isfinite(divergence) else 0.0
        smaller = scale * max(_SMALLEST_FACTOR, factor)
        _rescale(optimizer, scale, smaller)
        scale, attempts = smaller, attempts + 1


def _rescale(optimizer: MasterOptimizer, scale: float, smaller: float) -> None:
    """Scale the step of the last update from ``scale``, its share now, to ``smaller``.

    The step follows from the moments, so no copy of the weights is needed; they are as if it had been smaller, up to rounding.
    """
    for group in optimizer.adamw.param_groups:
        (beta1, beta2), decay = group["betas"], group["lr"] * group["weight_decay"]
        for master in optimizer.updated.intersection(group["params"]):
            moments = optimizer.adamw.state[master]
            updates = float(moments["step"])
            root = (moments["exp_avg_sq"] / (1 - beta2**updates)).sqrt_().add_(group["eps"])
            change = moments["exp_avg"].div(root).mul_(group["lr"] / (1 - beta1**updates))
            master.add_(change, alpha=scale).div_(1 - scale * decay)
            master.mul_(1 - smaller * decay).sub_(change, alpha=smaller)
    optimizer.tuning.publish()


def _some_batches(part: MiniBatch, seed: str) -> list[int]:
    """The numbers of micro-batches with about `_MOST_TOKENS` trained tokens; of one or more."""
    numbers = list(range(len(part.batches)))
    random.Random(seed).shuffle(numbers)
    found, tokens = list[int](), 0
    for number in numbers:
        if tokens < _MOST_TOKENS:
            found.append(number)
            tokens += len(part.batches[number].targets_E)
    return found


def _divergence(forward: Forward, part: MiniBatch, before: Sequence[Tensor], numbers: Sequence[int]) -> float:
    """The mean over tokens of r − 1 − log r with r = policy / policy before, an estimate of KL(before ‖ policy) from samples of the
    policy before (k3 of http://joschu.net/blog/kl-approx.html)."""
    total, tokens = 0.0, 0
    for number in numbers:
        batch = part.batches[number]
        now_E = forward.logprobs(batch, part.rows)[0][: len(batch.targets_E)]
        difference_E = now_E - before[number]
        total += float((difference_E.exp() - 1 - difference_E).sum(dtype=torch.float64))
        tokens += len(difference_E)
    return total / tokens if tokens else 0.0
