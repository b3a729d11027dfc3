"""The memory of a token in the sampler's cache and in a training pass, and the division of the free memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_core.errors import ConfigError
from lightning_core.model.attention import Geometry
from lightning_core.model.compute import ComputePlan, decoder_name, inputs

_PROBE_TOKENS = 64
_LEAST_ROW_TOKENS = 4096
MOST_TOKENS = 4096
"""Most tokens of a training pass that is not configured."""


def cached_bytes(geometry: Geometry, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token on the tree path."""
    return 2 * geometry.layers * geometry.kv_heads * geometry.width * dtype.itemsize


def trained_bytes(model: Any, path: ComputePlan, trained: Iterable[Tensor], *, entropy: bool) -> int:
    """Bytes that a forward pass keeps for the backward pass, per token. Measured with a pass of 64 tokens.

    The model must be set up for training; ``trained``: its weights that are not its parameters, such as adapters.
    ``entropy``: the loss has the entropy, which needs all logits twice; otherwise `OutputHead` never keeps them.
    """
    tensors = (*model.parameters(), *model.buffers(), *trained)
    weights = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = model.get_input_embeddings().weight.device
    vocabulary: int = model.config.get_text_config().vocab_size
    tokens = torch.arange(_PROBE_TOKENS, device=device) * 7 % vocabulary
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = getattr(model, decoder_name(model))(**inputs(path, tokens)).last_hidden_state
    del hidden
    return sum(kept.values()) // _PROBE_TOKENS + (2 * 4 * vocabulary if entropy else 0)


def steady_bytes(row_bytes: int) -> int:
    """The part of ``row_bytes`` that running responses may hold between steps. The rest is for a block that is copied while it grows."""
    return row_bytes * 2 // 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The use of the free memory by a trainer."""

    cache_tokens: int
    """Tokens that the sampler keeps for later prompts."""
    micro_batch_tokens: int
    """Tokens of a training pass."""
    cache_bytes: int
    """Bytes of a full cache."""
    row_bytes: int
    """Bytes for the keys and values of running responses, including the copies while they grow; 0 if they are not bounded."""
    row_tokens: int
    """Tokens of running responses that fit, without copies; each prompt that several responses share counts once."""
    most_tokens: int
    """Tokens of a training pass that fit. Longer ones, of rows that are longer or as configured, recompute their layers."""
    trained_token_bytes: int
    """Bytes of a token in a training pass, beside weights, gradients and moments; see `trained_bytes`."""


def plan(
    free: int,
    *,
    weights: int,
    cached: int,
    trained: int,
    cache_bytes: int | None,
    micro_batch_tokens: int | None,
) -> MemoryPlan:
    """Divide ``free`` bytes: a quarter for the sampler's cache, and a third of the rest each for running responses and a training pass.

    What is left is for the agents and for temporary tensors.

    ``weights``: bytes that gradients and moments will need; they are allocated by the first step. ``cached``, ``trained``:
    bytes per token; 0 if there is no cache. ``cache_bytes``, ``micro_batch_tokens``: as configured; None to choose.
    A training pass has at most 4,096 tokens, beyond which it gets no faster, and at least 256. A longer row may also use the
    memory of the cache, which is empty during updates. Running responses get at least 4,096
    tokens. Raises `ConfigError` if the cache does not fit.
    """
    left = max(0, free - weights)
    if cached and cache_bytes is not None and cache_bytes > left:
        raise ConfigError(
            f"trainer.cache_gb: a cache of {cache_bytes / 2**30:,.1f} GB for each model does not fit: beside the weights, gradients and "
            f"moments {left / 2**30:,.1f} GB of memory are free; expected at most that"
        )
    cache = 0 if not cached else left // 4 if cache_bytes is None else cache_bytes
    chosen = max(256, min(MOST_TOKENS, (left - cache) // 3 // max(1, trained)))
    rows = max((left - cache) // 3, _LEAST_ROW_TOKENS * cached * 3 // 2) if cached else 0
    tokens = chosen if micro_batch_tokens is None else micro_batch_tokens
    return MemoryPlan(
        cache_tokens=cache // cached if cached else 0,
        micro_batch_tokens=tokens,
        cache_bytes=cache,
        row_bytes=rows,
        row_tokens=steady_bytes(rows) // cached if cached else 0,
        most_tokens=max(256, (cache + (left - cache) // 3) // max(1, trained)),
        trained_token_bytes=trained,
    )
