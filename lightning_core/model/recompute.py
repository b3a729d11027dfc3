"""Gradient checkpointing (arXiv 1604.06174): saves only the inputs of layers.

The backward pass recomputes each layer.

The switch in transformers works only in training mode, which also enables dropout. Here the model stays in evaluation mode,
so trainer and sampler compute the same.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from lightning_core.errors import TrainingError


def recompute_layers(model: Any) -> None:
    """Make the decoder layers of a transformers model recompute in the backward pass.

    Passes without gradients, such as sampling, are unchanged. Raises `TrainingError` if transformers cannot checkpoint any
    layer of the model.
    """
    layers = _layers(model)
    if not layers:
        raise TrainingError(
            f"gradient_checkpointing: {type(model).__name__} has no layers that transformers can recompute"
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


@contextmanager
def recomputing(model: Any) -> Generator[None]:
    """Let forward passes in the body recompute the decoder layers in their backward pass; does nothing for other layers."""
    layers = [layer for layer in _layers(model) if not _is_recomputed(layer)]
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _layers(model: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _is_recomputed(layer: Any) -> bool:
    return isinstance(layer.forward, partial) and layer.forward.func is _recomputed


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Evaluation mode is deterministic, so there is no random state to restore.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
