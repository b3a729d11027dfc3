"""AdamW for verl's FSDP engines, with the decay groups of the embedded trainer.

verl imports it by ``optim.optimizer_impl`` and ``optim.optimizer`` and passes parameters without names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lightning_core.errors import ConfigError
from lightning_core.trainers.torch.optimizer import decay_groups


class AdamW(torch.optim.AdamW):
    """AdamW that decays matrices only."""

    def __init__(self, params: Iterable[torch.nn.Parameter], *, weight_decay: float, **options: Any) -> None:
        """Raises `ConfigError` if there are no matrices, because FSDP has flattened them."""
        found = list(params)
        if all(parameter.ndim < 2 for parameter in found):
            raise ConfigError(
                "trainer.weight_decay: FSDP has flattened the weights, so it is unknown which weights are matrices; use "
                "trainer.verl: {actor_rollout_ref.actor.strategy: fsdp2}, or set optim.optimizer_impl: torch.optim to "
                "decay all weights"
            )
        super().__init__(decay_groups((("", parameter) for parameter in found), weight_decay), **options)
