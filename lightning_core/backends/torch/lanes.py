"""Selects how the rows of a model are computed."""

from __future__ import annotations

from typing import Any

import torch

from lightning_core.backends.torch.plain_lane import PlainLane
from lightning_core.backends.torch.rows import Lane
from lightning_core.backends.torch.tree_lane import TreeLane
from lightning_core.backends.torch.verify import verify
from lightning_core.model.adapters import Adapters
from lightning_core.model.compute import ComputePlan


def make_lane(
    model: Any,
    path: ComputePlan,
    adapters: Adapters | None = None,
    *,
    deterministic: bool = False,
    dtype: torch.dtype | None = None,
) -> Lane:
    """The lane for a model on ``path``. ``adapters``: the adapters of ``model``, if it has any. ``dtype``: see `TreeLane`.

    ``deterministic``: its rows do not depend on each other, to the bit. Raises `TrainingError` if this machine cannot compute so.
    """
    lane: Lane = (
        PlainLane(model, cache=path.cache, adapters=adapters, alone=deterministic)
        if path.geometry is None
        else TreeLane(model, path.geometry, adapters=adapters, deterministic=deterministic, dtype=dtype)
    )
    if deterministic:
        verify(lane, model, adapters)
    return lane
