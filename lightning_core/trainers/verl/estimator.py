"""The advantage estimator that we register with verl: advantages come with the rows; here each token gets its weight in the loss.

verl would compute advantages of its own from rewards, one row of each rollout alone (GRPO) or every row for itself. Ours were computed by
`credit` when the rollouts ended, and stand in the rows as token-level rewards. The losses are linear in the advantage, so a token's
weight (`aggregation`) is multiplied into it, and the loss is then a plain sum: verl's own means count the rows that it pads
batches with, and know nothing of rollouts that stand in several rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_core.config.algorithm import Algorithm
from lightning_core.trainers.torch.aggregation import row_weights

ESTIMATOR = "lightning"
SETTINGS = "lightning"
"""Where in verl's section ``algorithm`` our own aggregation stands."""


def weighted_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[str],
    config: Mapping[str, Any],
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """(weight * advantage, advantage), both float32 [B, T].

    ``token_level_rewards``: the advantages, float32 [B, T]. ``response_mask`` [B, T]: 1 at sampled tokens, so that a row that verl
    padded the batch with has none, and no weight. ``index``: the rollout of each row. Weights are settled here, for all rows of an
    update's batch, before verl cuts it up among ranks and micro-batches.
    """
    advantages_BT = token_level_rewards.float()
    tokens = [int(count) for count in response_mask.sum(dim=-1)]
    settings = {key: config[SETTINGS][key] for key in ("aggregation", "sequence", "constant_tokens")}
    weights = row_weights(list(index), tokens, Algorithm.model_construct(**settings))
    weights_B = torch.tensor(weights, dtype=torch.float32, device=advantages_BT.device)
    return advantages_BT * weights_B[:, None], advantages_BT
