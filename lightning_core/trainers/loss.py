"""The loss: pure functions from logprobs and advantages to a number, and what there is to know about it.

Policy gradient with PPO's clipped ratio (arXiv 1707.06347), the clip range asymmetric (DAPO, arXiv 2503.14476):

    ratio_t = exp(logprob_t - sampled logprob_t)
    loss_t  = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)
    loss    = sum_t weight_t loss_t

The weights of a step's tokens are settled before anything is cut into micro-batches, so the gradient is the same however rows
are packed, merged or accumulated.

Dimensions: E trained tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_core.errors import TrainingError
from lightning_core.transitions import Row

Aggregation = Literal["rollout-mean", "token-mean"]


def token_weights(rows: Sequence[Row], aggregation: Aggregation) -> list[NDArray[np.float32]]:
    """The weight of each token of each row, float32 [L], 0 where the mask is False; all weights together are 1.

    ``rollout-mean``: the mean over rollouts of the mean over each rollout's tokens, in however many rows they stand (arXiv
    2608.17528, eq. 16; the divisor is the number of rollouts, not of rows). ``token-mean``: the mean over all tokens.
    """
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[row.rollout] += int(row.mask.sum())
    if not tokens.total():
        raise TrainingError(f"none of the {len(rows)} rows has a sampled token")
    trained = [rollout for rollout, count in tokens.items() if count]
    if aggregation == "rollout-mean":
        weight = {rollout: 1.0 / (len(trained) * tokens[rollout]) for rollout in trained}
    else:
        weight = dict.fromkeys(trained, 1.0 / tokens.total())
    return [(row.mask * weight.get(row.rollout, 0.0)).astype(np.float32) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What the loss made of some trained tokens; metrics are sums over them, to be added up and divided once."""

    loss: Tensor
    sums: Mapping[str, float]
    maxima: Mapping[str, float]


def policy_loss(
    logprobs_E: Tensor,
    sampled_logprobs_E: Tensor,
    advantages_E: Tensor,
    weights_E: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The clipped policy gradient loss (see above) of E tokens; all tensors float32 [E]."""
    log_ratio_E = logprobs_E - sampled_logprobs_E
    ratio_E = log_ratio_E.exp()
    clipped_E = ratio_E.clamp(1 - clip_low, 1 + clip_high)
    loss = -(torch.minimum(ratio_E * advantages_E, clipped_E * advantages_E) * weights_E).sum()
    with torch.no_grad():
        difference_E = log_ratio_E.abs()
        sums = {
            "ratio_mean": ratio_E.sum(),
            # Only where the clip takes the gradient away: up for what was good, down for what was bad.
            "clip_high_fraction": ((ratio_E > 1 + clip_high) & (advantages_E > 0)).sum(),
            "clip_low_fraction": ((ratio_E < 1 - clip_low) & (advantages_E < 0)).sum(),
            # k3, from sampled to present policy: http://joschu.net/blog/kl-approx.html
            "approx_kl": (ratio_E - 1 - log_ratio_E).sum(),
            "logprob_difference_mean": difference_E.sum(),
            # An estimate without bias, from the sampled tokens alone.
            "entropy": -logprobs_E.sum(),
        }
        maxima = {"ratio_max": ratio_E.max(), "logprob_difference_max": difference_E.max()}
    return TokenLoss(
        loss=loss,
        sums={name: float(value) for name, value in sums.items()},
        maxima={name: float(value) for name, value in maxima.items()},
    )
