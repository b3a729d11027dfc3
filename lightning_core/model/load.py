"""A model in memory, ready to be trained and sampled from, and all that belongs to it whoever trains it."""

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
from lightning_core.model.settings import TorchTrainerConfig
from lightning_core.model.source import eos_token_ids, load_model, load_tokenizer, resolve_model
from lightning_core.model.tuning import choose_device


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Weights, tokenizer and what is known of both. Policies with adapters may have one together."""

    model: Any
    tokenizer: Any
    device: torch.device
    geometry: Geometry
    adapters: Adapters
    stop_token_ids: frozenset[int]
    constraints: Constraints
    max_context: int
    """Most tokens of prompt and response, as configured or else as the model allows."""


def load(config: TorchTrainerConfig) -> LoadedModel:
    """The model that ``config`` names. Raises `ConfigError` if there is none, or if it allows fewer tokens than are asked for."""
    device = choose_device(config.device)
    set_product_precision(config.dtype, device)
    folder = resolve_model(config.model)
    tokenizer = load_tokenizer(folder)
    model: Any = load_model(folder, choose_dtype(config.dtype, device), device)
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or config.max_context or 0)
    if config.max_context is not None and config.max_context > limit:
        raise ConfigError(f"max_context={config.max_context}, but {config.model!r} allows {limit} tokens")
    geometry = use_lightning_attention(model)
    if config.gradient_checkpointing:
        recompute_layers(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        device=device,
        geometry=geometry,
        adapters=Adapters(model),
        stop_token_ids=eos_token_ids(model),
        constraints=Constraints(tokenizer, model.get_output_embeddings().weight.shape[0]),
        max_context=config.max_context or limit,
    )
