"""Selects how the rows of a model are computed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from lightning_core.backends.torch.cache_check import check_cache
from lightning_core.backends.torch.cohort_lane import CohortLane
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
    if path.geometry is not None:
        lane: Lane = TreeLane(model, path.geometry, adapters=adapters, deterministic=deterministic, dtype=dtype)
    else:
        lane = _make_plain_lane(model, path.cache, adapters, alone=deterministic)
    if deterministic:
        verify(lane, model, adapters)
    return lane


def _make_plain_lane(model: Any, cache: str | None, adapters: Adapters | None, *, alone: bool) -> Lane:
    if cache is not None and not alone:
        with nullcontext() if adapters is None else adapters.use(None):
            support = check_cache(model, cache)
        if support.ragged:
            return PlainLane(model, support, cache=cache, adapters=adapters)
    return CohortLane(model, cache=cache, adapters=adapters, alone=alone)
