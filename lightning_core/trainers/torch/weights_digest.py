"""A digest of all weights of policies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightning_core.trainers.torch.policy_model import PolicyModel

_THREADS = 4


def weights_digest(models: Mapping[str, PolicyModel]) -> str:
    """A SHA-256 of the names, shapes and float32 values of the weights of ``models``, by policy, trained and frozen ones."""
    named: list[tuple[str, Tensor]] = []
    for policy, model in models.items():
        weights = {**dict(model.network.named_parameters()), **model.tuning.masters}
        named += [(f"{policy}/{name}", weights[name]) for name in sorted(weights)]
    distinct = {id(tensor): tensor for _, tensor in named}  # policies may share a model
    with ThreadPoolExecutor(_THREADS) as threads:
        hashes = dict(zip(distinct, threads.map(_hash, distinct.values()), strict=True))
    lines = [f"{name} {list(tensor.shape)} {hashes[id(tensor)]}\n" for name, tensor in named]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _hash(tensor: Tensor) -> str:
    values = tensor.detach().to("cpu", torch.float32).contiguous().reshape(-1)
    return hashlib.sha256(values.numpy().data).hexdigest()
