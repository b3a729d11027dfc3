"""Gradient checkpointing (arXiv 1604.06174): saves only the inputs of layers.

The backward pass recomputes each layer.

The switch in transformers works only in training mode, which also enables dropout. Here the model stays in evaluation mode,
so trainer and sampler compute the same.
"""

from __future__ import annotations

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
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise TrainingError(
            f"gradient_checkpointing: {type(model).__name__} has no layers that transformers can recompute"
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Evaluation mode is deterministic, so there is no random state to restore.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
