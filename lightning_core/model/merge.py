"""Adds an adapter to the weights of its layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_core.errors import ConfigError


@torch.no_grad()
def merge(model: Any, matrices: Mapping[str, Tensor], *, alpha: float) -> dict[str, Tensor]:
    """The weights of the adapted layers with the adapter added, by all of their names in ``model``.

    ``matrices``: A [R, I] and B [O, R] of each layer, named as `Adapters.add` names them. ``alpha``: the scale times the
    rank. The sums are computed in float32 and have the dtype of the weights, which are not changed. Raises `ConfigError`
    if a weight cannot hold the sum (see `unmergeable`).
    """
    layers = layers_of(matrices)
    if reason := unmergeable(model, layers):
        raise ConfigError(
            f"the adapter cannot be merged: {reason}. Use --format peft, or train with policy.tuning: full"
        )
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    weights: dict[str, Tensor] = {}
    for layer in layers:
        down_RI, up_OR = matrices[f"{layer}.lora_A"], matrices[f"{layer}.lora_B"]
        weight_OI = model.get_submodule(layer).weight
        update_OI = alpha / down_RI.shape[0] * (up_OR.float() @ down_RI.float())
        merged_OI: Tensor = (weight_OI.float() + update_OI).to(weight_OI.dtype)
        weights.update(dict.fromkeys(names[id(weight_OI)], merged_OI))
    return weights


def layers_of(weights: Iterable[str]) -> list[str]:
    """The layers of an adapter's matrices, named as `Adapters.add` names them."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in weights))


def unmergeable(model: Any, layers: Iterable[str]) -> str | None:
    """The reason adapters on ``layers`` cannot be added to the weights of ``model``, or None.

    Some models, such as Zamba2, use one weight in several layers, and each of them has its own adapter.
    """
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    shared = [layer for layer in layers if users[id(model.get_submodule(layer).weight)] > 1]
    if not shared:
        return None
    return f"the weights of {len(shared)} layers, such as {shared[0]!r}, belong to other layers too, which have other adapters or none"
