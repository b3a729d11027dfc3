"""The two ways to compute a model, and the choice between them.

*Tree*: one packed sequence with our attention function, which computes shared prefixes once and has its own cache. It
fits models whose layers are all plain attention, full or within a sliding window, with dense or expert layers in between.

*Plain*: Hugging Face's own forward pass and cache, with one row per sequence. It fits every causal model, is slower, and
shares nothing between rows.

The tree path is used if it gives the logits of the model's own forward pass on branching sequences.
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
from lightning_core.model.attention import NAME, Geometry, TreeAttention, UnsupportedAttention, attention, causal
from lightning_core.model.forest import Forest, plan_blocks
from lightning_core.model.precision import exact_products

_KINDS = {"full_attention", "sliding_attention"}
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
    tokens = torch.arange(28, device=_device(model)) * 7 % model.config.get_text_config().vocab_size
    with torch.no_grad(), small_windows(model), exact_products():
        expected = _own_logits(model, tokens)
        previous = model.config.get_text_config()._attn_implementation
        try:
            return ComputePlan(geometry=_tree_geometry(model, tokens, expected), replaced=previous)
        except UnsupportedAttention as found:
            return plain_path(model, str(found), attention=previous)


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


def _own_logits(model: Any, tokens: Tensor) -> Tensor:
    """The logits [28, V] of two sequences that share their first 12 tokens, by the model's own forward pass."""
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
    if not relative_error(second[:12], first[:12]) < tolerance(model):
        raise TrainingError(
            f"the logits of {type(model).__name__} depend on later tokens, so it cannot be sampled token by token; "
            "use a causal language model"
        )
    return torch.cat([first, second[12:]])


def _tree_geometry(model: Any, tokens: Tensor, expected: Tensor) -> Geometry:
    """Switch to tree attention and compare; raises `UnsupportedAttention` if it does not fit."""
    from transformers import AttentionInterface

    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= _KINDS:
        raise UnsupportedAttention(f"it has layers of the types {sorted(kinds - _KINDS)}")
    AttentionInterface.register(NAME, attention)
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise UnsupportedAttention(f"transformers cannot replace its attention: {error}") from error
    if config._attn_implementation != NAME:
        raise UnsupportedAttention("it does not use transformers' AttentionInterface")
    probe = _Probe()
    positions = torch.cat([torch.arange(20), torch.arange(12, 20)]).to(tokens.device)
    try:
        output = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **{NAME: probe})
    except UnsupportedAttention:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UnsupportedAttention(f"it fails with another attention function: {error}") from error
    geometry = probe.geometry(config)
    error = relative_error(output.logits[0].float(), expected)
    if not error < tolerance(model):
        raise UnsupportedAttention(f"it gives other logits with tree attention (relative error {error:.2g})")
    return geometry


class _Probe:
    """Tree attention of two sequences with a common prefix, which records how it is called."""

    def __init__(self) -> None:
        self._blocks = plan_blocks(Forest(lengths=[12, 8, 8], parents=[-1, 0, 0]), limit=8)
        self._calls: list[tuple[int, int, int, int]] = []

    def attend(
        self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        if value_KSD.shape != key_KSD.shape or query_HSD.shape[2] != key_KSD.shape[2]:
            raise UnsupportedAttention("its queries, keys and values have different widths")
        groups = query_HSD.shape[0] // key_KSD.shape[0]
        self._calls.append((layer, key_KSD.shape[0], groups, key_KSD.shape[2]))
        tree = TreeAttention(self._blocks, groups=groups, device=key_KSD.device)
        return tree.attend(layer, query_HSD, key_KSD, value_KSD, scaling, window)

    def geometry(self, config: Any) -> Geometry:
        """The common shape of all layers. Raises `UnsupportedAttention` if there is none."""
        layers: int = config.num_hidden_layers
        if [call[0] for call in self._calls] != list(range(layers)):
            raise UnsupportedAttention(
                f"its {layers} layers call attention {len(self._calls)} times instead of once each, in order"
            )
        if len({call[1:] for call in self._calls}) != 1:
            raise UnsupportedAttention("the attention of its layers has different shapes")
        _, kv_heads, groups, width = self._calls[0]
        return Geometry(layers=layers, kv_heads=kv_heads, groups=groups, width=width)


@contextmanager
def small_windows(model: Any) -> Generator[None]:
    """Make all sliding windows of ``model`` 8 tokens wide, so a short check leaves them."""
    changed: list[tuple[Any, int]] = []
    for holder in (model.config, model.config.get_text_config(), *model.modules()):
        if isinstance(vars(holder).get("sliding_window"), int):
            changed.append((holder, holder.sliding_window))
            holder.sliding_window = min(_WINDOW, holder.sliding_window)
    try:
        yield
    finally:
        for holder, before in reversed(changed):
            holder.sliding_window = before


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The mean difference, relative to the spread of the expected values."""
    return ((actual - expected).abs().mean() / expected.std()).item()


def decoder_name(model: Any) -> str:
    """The attribute of a causal language model that has its decoder: the layers below the output layer.

    Raises `TrainingError` if it cannot be found.
    """
    named: str = model.base_model_prefix
    decoder = next((name for name in (named, "model", "transformer", "backbone") if name in model._modules), None)
    if decoder is None:
        raise TrainingError(f"{type(model).__name__} has no decoder that can be found in its parts {[*model._modules]}")
    return decoder


def tolerance(model: Any) -> float:
    """The largest relative difference of logits that rounding can explain."""
    return 1e-3 if model.dtype == torch.float32 else 0.05


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
