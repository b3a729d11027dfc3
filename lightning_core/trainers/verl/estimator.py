"""The advantage estimator registered with verl.

It multiplies the rows' advantages by each token's weight in the loss, and gives the tokens with a cross-entropy their weight in theirs.

The advantages are computed by `credit` when the rollouts end and arrive as the rows' token-level rewards. verl's own estimators compare
one row per rollout (GRPO) or treat rows separately. The losses are linear in the advantage, so multiplying by the token's weight
(`aggregation`) makes the loss a plain sum. verl's own means would count padding rows and ignore that a rollout may have several rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_core.config.algorithm import Algorithm
from lightning_core.trainers.torch.aggregation import cross_entropy_row_weights, row_weights
from lightning_core.trainers.verl.policy_loss import call_numbers

ESTIMATOR = "lightning"
SETTINGS = "lightning"
"""The key of our aggregation in verl's section ``algorithm``."""


def weighted_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[str],
    config: Mapping[str, Any],
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """(weight * advantage, advantage), both float32 [B, T]; where no token was sampled, the weight in the cross-entropy, and 0.

    ``token_level_rewards``: the advantages, float32 [B, T], and with a cross-entropy its coefficients where no token was sampled.
    ``response_mask`` [B, T]: 1 at sampled tokens; padding rows have none and get no weight. ``index``: the rollout of each row. Weights
    are computed for all rows of a step, before verl splits it into mini-batches, and those among ranks and micro-batches. They sum
    to 1 in the average mini-batch, weights of the cross-entropy to the mean of its coefficients.
    """
    mask_BT = response_mask.bool()
    advantages_BT = token_level_rewards.float() * mask_BT
    settings = {key: config[SETTINGS][key] for key in ("aggregation", "sequence", "constant_tokens")}
    if settings["aggregation"] == "sequence-mean" and settings["sequence"] == "call":
        numbers_BT = call_numbers(response_mask)
        tokens = torch.bincount(numbers_BT[response_mask.bool()]).tolist()
        rollouts = [""] * len(tokens)
    else:
        numbers_BT = torch.arange(len(advantages_BT), device=advantages_BT.device)[:, None].expand_as(advantages_BT)
        tokens = [int(count) for count in response_mask.sum(dim=-1)]
        rollouts = list(index)
    weights = row_weights(rollouts, tokens, Algorithm.model_construct(**settings))
    updates = config[SETTINGS]["mini_batches"]
    weights_N = torch.tensor(weights, dtype=torch.float32, device=advantages_BT.device) * updates
    weighted_BT = advantages_BT * weights_N[numbers_BT]
    if config[SETTINGS]["cross_entropy"]:
        coefficients_BT = token_level_rewards.float() * ~mask_BT
        own = cross_entropy_row_weights(list(index), (coefficients_BT != 0).sum(dim=-1).tolist())
        own_B = torch.tensor(own, dtype=torch.float32, device=advantages_BT.device) * updates
        weighted_BT = weighted_BT + coefficients_BT * own_B[:, None]
    return weighted_BT, advantages_BT
