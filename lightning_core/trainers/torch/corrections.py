"""Importance weights for tokens that were sampled by another policy than the trained one.

Probabilities differ if the sampler uses older weights, and also with the same weights in another engine or precision (arXiv
2510.26788). With the *proximal* policy, the trainer's at the start of the step, between the two (decoupled PPO, arXiv
2505.24298):

    loss_t = w_t loss(policy / proximal)_t,    w_t = proximal / sampling policy, kept within bounds
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_core.config.algorithm import Importance


def importance_weights(log_ratio_E: Tensor, importance: Importance) -> tuple[Tensor, Tensor]:
    """The weights w, float32 [E], and bool [E]: whether the ratio was out of bounds.

    Both are detached.
    ``log_ratio_E``: log(proximal / sampling policy) of each token, or summed over its sequence.

    - ``tis``: the ratio clamped to the bounds (truncated importance sampling: Yao et al., 2025,
      https://fengyao.notion.site/off-policy-rl).
    - ``mask``: 0 out of bounds (IcePop, arXiv 2510.18855).
    """
    # The ratio of a long sequence can exceed float32 before it is clamped.
    ratio_E = log_ratio_E.detach().double().exp()
    high = math.inf if importance.high is None else importance.high
    outside_E = (ratio_E < importance.low) | (ratio_E > high)
    weights_E = (
        ratio_E.clamp(importance.low, high)
        if importance.kind == "tis"
        else torch.where(outside_E, torch.zeros_like(ratio_E), ratio_E)
    )
    return weights_E.float(), outside_E
