"""The two ways to compute a model, and the choice between them.

*Tree*: one packed sequence with our attention function, which computes shared prefixes once and has its own cache. It
fits models whose layers are all plain attention, full or within a sliding window, with dense or expert layers in between.

*Plain*: Hugging Face's own forward pass and cache, with one row per sequence. It fits every causal model, and is slower:
training shares nothing between rows, and sampling shares no attention.

The tree path is used if it gives the logits and gradients of the model's own passes, see `tree_check`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lightning_core.errors import TrainingError
from lightning_core.model.attention import NAME, Geometry, UnsupportedAttention, causal
from lightning_core.model.precision import exact_products
from lightning_core.model.tree_check import tree_geometry

_KINDS = {"full_attention", "sliding_attention"}
_WINDOWS = {"sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size"}
"""Settings of attention that limit the distance of tokens."""
_WINDOW = 8
"""The sliding window during the check, so few tokens suffice to leave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlan:
    """The plan by which a model is computed."""

    geometry: Geometry | None = None
    """The shape of its attention on the tree path; None on the plain path."""
    cache: str | None = None
    """On the plain path: the argument for the model's cache, which the output has under the same name. None: sampling
    recomputes the whole context for each token."""
    reason: str = ""
    """The reason a faster path does not fit."""
    replaced: str | None = None
    """On the tree path: the name of the model's own attention function."""

    def __str__(self) -> str:
        if self.geometry is not None:
            return "tree path"
        return f"plain path{'' if self.cache else ' without a cache'} ({self.reason})"


def choose_path(model: Any) -> ComputePlan:
    """The path of ``model``; on the tree path the model is switched to tree attention.

    Raises `TrainingError` if its forward pass fails, or its logits are not finite or depend on later tokens.
    """
    config = model.config.get_text_config()
    previous = config._attn_implementation
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    with small_windows(model), exact_products():
        _check_causal(model, torch.arange(28, device=_device(model)) * 7 % config.vocab_size)
        try:
            if not kinds <= _KINDS:
                raise UnsupportedAttention(f"it has layers of the types {sorted(kinds - _KINDS)}")
            return ComputePlan(geometry=tree_geometry(model, getattr(model, decoder_name(model))), replaced=previous)
        except UnsupportedAttention as found:
            return plain_path(model, found.reason, attention=previous)


@torch.no_grad()
def plain_path(model: Any, reason: str, *, attention: str | None) -> ComputePlan:
    """The plain path, because of ``reason``. ``attention``: the name of the model's own attention function."""
    if attention is not None and model.config.get_text_config()._attn_implementation != attention:
        model.set_attn_implementation(attention)
    return ComputePlan(cache=_cache_name(model, torch.arange(8, device=_device(model))), reason=reason)


def logits(model: Any, path: ComputePlan, tokens_S: Tensor) -> Tensor:
    """The logits [S, V], float32, of one sequence."""
    return model(**inputs(path, tokens_S)).logits[0].float()


def inputs(path: ComputePlan, tokens_S: Tensor) -> dict[str, Any]:
    """The arguments of a model, or of its decoder, for one sequence."""
    arguments: dict[str, Any] = {"input_ids": tokens_S[None], "use_cache": False}
    if path.geometry is not None:
        arguments["position_ids"] = torch.arange(len(tokens_S), device=tokens_S.device)[None]
        arguments[NAME] = causal(len(tokens_S), groups=path.geometry.groups, device=tokens_S.device)
    return arguments


def _cache_name(model: Any, tokens: Tensor) -> str | None:
    """The argument for the model's cache; None if it has no cache whose rows can be selected."""
    try:
        output = model(input_ids=tokens[None], use_cache=True)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # it can still work without
        return None
    accepted = signature(type(model).forward).parameters
    names = (name for name in ("past_key_values", "cache_params") if name in accepted)
    return next((name for name in names if hasattr(getattr(output, name, None), "reorder_cache")), None)


@torch.no_grad()
def _check_causal(model: Any, tokens: Tensor) -> None:
    """Raise `TrainingError` if the model's own forward pass fails, or its logits are not finite or depend on later tokens."""
    try:
        first = model(input_ids=tokens[None, :20], use_cache=False).logits[0].float()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # code of transformers, with any values of config.json
        raise TrainingError(
            f"the forward pass of {type(model).__name__} fails on 20 tokens with {type(error).__name__}: {error}; the usual cause "
            "are values of config.json that do not fit each other: use an unchanged copy of the model"
        ) from error
    if not bool(first.isfinite().all()):
        raise TrainingError(_not_finite(model))
    second = model(input_ids=torch.cat([tokens[:12], tokens[20:]])[None], use_cache=False).logits[0].float()
    error = float((second[:12] - first[:12]).abs().mean() / first[:12].std())
    # Both passes have as many tokens, so rounding hardly differs even in bfloat16: measured is 0.
    if not error < (1e-3 if model.dtype == torch.float32 else 5e-3):
        raise TrainingError(
            f"the logits of {type(model).__name__} depend on later tokens, so it cannot be sampled token by token; "
            "use a causal language model"
        )


@contextmanager
def small_windows(model: Any) -> Generator[None]:
    """Make all sliding windows of ``model`` 8 tokens wide, so a short check leaves them."""
    changed: list[tuple[Any, str, int]] = []
    for holder in (model.config, model.config.get_text_config(), *model.modules()):
        for name in _WINDOWS & vars(holder).keys():
            width = getattr(holder, name)
            if isinstance(width, int):
                changed.append((holder, name, width))
                setattr(holder, name, min(_WINDOW, width))
    try:
        yield
    finally:
        for holder, name, before in reversed(changed):
            setattr(holder, name, before)


def decoder_name(model: Any) -> str:
    """The attribute of a causal language model that has its decoder: the layers below the output layer.

    Raises `TrainingError` if it cannot be found.
    """
    named: str = model.base_model_prefix
    decoder = next((name for name in (named, "model", "transformer", "backbone") if name in model._modules), None)
    if decoder is None:
        raise TrainingError(f"{type(model).__name__} has no decoder that can be found in its parts {[*model._modules]}")
    return decoder


def _device(model: Any) -> torch.device:
    return model.get_input_embeddings().weight.device


def _not_finite(model: Any) -> str:
    """The message for a model whose logits are not finite."""
    wrong = [name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all())]
    cause = (
        f"{len(wrong)} of its weights contain NaN or infinity, such as {wrong[0]!r}; use an undamaged copy of the model"
        if wrong
        else f"its weights are finite, so {model.dtype} overflows; set policy.dtype to another type"
    )
    return f"the logits of {type(model).__name__} are not finite: {cause}"
