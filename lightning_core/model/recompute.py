"""Gradient checkpointing (arXiv 1604.06174): memory for the inputs of the layers only, and each layer computed once more.

transformers has a switch for it, which works in training mode only, and training mode would also switch dropout on. Here the
model stays in evaluation mode, where trainer and sampler compute the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from lightning_core.errors import TrainingError


def recompute_layers(model: Any) -> None:
    """From now on ``model``, a transformers model, forgets what is inside its decoder layers until the backward pass needs it.

    Nothing changes where no gradient is wanted, so not when sampling. Raises `TrainingError` for a model without such layers.
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
    # No random state to restore: in evaluation mode nothing is random.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
