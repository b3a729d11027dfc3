"""A model in memory, ready to be trained and sampled from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_core.errors import ConfigError
from lightning_core.model.adapters import Adapters
from lightning_core.model.compute import ComputePlan, choose_path
from lightning_core.model.constraint import Constraints
from lightning_core.model.precision import choose_dtype, set_product_precision
from lightning_core.model.recompute import recompute_layers
from lightning_core.model.refusals import check_vocabulary
from lightning_core.model.source import eos_token_ids, load_config, load_model, load_tokenizer, positions, resolve_model
from lightning_core.model.tuning import choose_device

UNLIMITED = 32768
"""Maximum tokens of a model without positions, such as Mamba, if none are configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Weights, tokenizer and their properties.

    Policies that are adapters of one model share one.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    path: ComputePlan
    adapters: Adapters
    stop_token_ids: frozenset[int]
    constraints: Constraints
    max_context: int
    """Maximum tokens of prompt and response: as configured, else the model's limit."""


def context_limit(config: Any, unlimited: int) -> int:
    """Most tokens of a sequence whose result does not depend on the pass. ``unlimited``: for models without a limit.

    LongRoPE (arXiv 2402.13753) has other frequencies if the longest sequence of a pass is longer than the sequences of
    pre-training. The tokens of shorter sequences, and cached tokens, would then depend on their neighbors.
    """
    limit = positions(config) or unlimited
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(nested for nested in ropes.values() if isinstance(nested, dict))):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            limit = min(limit, int(original or getattr(config, "original_max_position_embeddings", None) or limit))
    return limit


def load(
    name: str,
    *,
    device: str,
    dtype: str,
    max_context: int | None,
    gradient_checkpointing: bool,
    check_tokenizer: Callable[[Any], object],
) -> LoadedModel:
    """Load the model ``name`` (see `resolve_model`) and choose its path (see `choose_path`).

    ``device`` and ``dtype``: see `choose_device` and `choose_dtype`. ``max_context``: None for the model's limit.
    ``check_tokenizer`` is called before the weights are loaded, since that takes long. Raises `ConfigError` if the model does
    not exist or is not usable, or its limit is below ``max_context``.
    """
    chosen = choose_device(device)
    set_product_precision(dtype, chosen)
    folder = resolve_model(name)
    config = load_config(folder)
    limit = context_limit(config.get_text_config(), max_context or UNLIMITED)
    if max_context is not None and max_context > limit:
        raise ConfigError(f"max_context={max_context}, but {name!r} can be computed exactly up to {limit} tokens")
    tokenizer: Any = load_tokenizer(folder)
    check_tokenizer(tokenizer)
    model: Any = load_model(folder, choose_dtype(dtype, chosen), chosen, config=config)
    check_vocabulary(folder, tokenizer, model.get_input_embeddings().weight.shape[0])
    path = choose_path(model)
    if gradient_checkpointing:
        recompute_layers(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        device=chosen,
        path=path,
        adapters=Adapters(model),
        stop_token_ids=eos_token_ids(model),
        constraints=Constraints(tokenizer, model.get_output_embeddings().weight.shape[0]),
        max_context=max_context or limit,
    )
