"""A model in memory, ready to be trained and sampled from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_core.errors import ConfigError
from lightning_core.model.adapters import Adapters
from lightning_core.model.attention import Geometry, use_lightning_attention
from lightning_core.model.constraint import Constraints
from lightning_core.model.precision import choose_dtype, set_product_precision
from lightning_core.model.recompute import recompute_layers
from lightning_core.model.source import eos_token_ids, load_model, load_tokenizer, resolve_model
from lightning_core.model.tuning import choose_device


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Weights, tokenizer and their properties.

    Policies that are adapters of one model share one.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    geometry: Geometry
    adapters: Adapters
    stop_token_ids: frozenset[int]
    constraints: Constraints
    max_context: int
    """Maximum tokens of prompt and response: as configured, else the model's limit."""


def load(name: str, *, device: str, dtype: str, max_context: int | None, gradient_checkpointing: bool) -> LoadedModel:
    """Load the model ``name`` (see `resolve_model`) and switch it to tree attention.

    ``device`` and ``dtype``: see `choose_device` and `choose_dtype`. ``max_context``: None for the model's limit.
    Raises `ConfigError` if the model does not exist or its limit is below ``max_context``.
    """
    chosen = choose_device(device)
    set_product_precision(dtype, chosen)
    folder = resolve_model(name)
    tokenizer = load_tokenizer(folder)
    model: Any = load_model(folder, choose_dtype(dtype, chosen), chosen)
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_context or 0)
    if max_context is not None and max_context > limit:
        raise ConfigError(f"max_context={max_context}, but {name!r} allows {limit} tokens")
    geometry = use_lightning_attention(model)
    if gradient_checkpointing:
        recompute_layers(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        device=chosen,
        geometry=geometry,
        adapters=Adapters(model),
        stop_token_ids=eos_token_ids(model),
        constraints=Constraints(tokenizer, model.get_output_embeddings().weight.shape[0]),
        max_context=max_context or limit,
    )
