"""The check that tree attention computes what a model's own attention does.

Two rows with a common prefix are computed alone by the model's own forward pass, and together as a tree. Compared are:

- the arguments of attention: `attention` refuses those that it does not compute with;
- the logits of short rows;
- the gradients of all parameters there. They also show a parameter that has no effect on the logits yet, such as a bias
  that starts at zero;
- the hidden states of long rows after the first layers, which is cheap, for effects that begin after some tokens.

All in float32, see `float32_layers`. Gradients are compared by random projections, so none has to be kept.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_core.model.attention import NAME, Geometry, TreeAttention, UnsupportedAttention, attention
from lightning_core.model.forest import BLOCK_TOKENS, Forest, plan_blocks
from lightning_core.model.precision import float32_layers
from lightning_core.model.source import positions

_PROJECTIONS = 4
"""A gradient matrix is projected to this many rows and columns."""
_PROJECTED_ROWS = 2**13
"""Rows of a gradient that are projected at a time, which bounds the memory of copies."""
_TOLERANCE = 1e-3
"""The largest relative difference that float32 can explain; measured are about 1e-6."""
_NOISE = 1e-6
"""Rounding of a gradient that is mathematically zero, relative to the largest one."""


class _Pass(NamedTuple):
    """A forward pass over a tree."""

    places_BL: Tensor
    """The places in the tree of the tokens of its rows."""
    keywords: dict[str, Any]
    """The arguments of the model besides the tokens."""


class _Tree(NamedTuple):
    """Two rows with a common prefix."""

    prefix: int
    ends: tuple[int, int]
    limit: int
    """See `plan_blocks`."""

    def alone(self) -> list[_Pass]:
        """Each row in its own pass."""
        first, size = self.prefix + self.ends[0], self.prefix + sum(self.ends)
        second_L = torch.cat([torch.arange(self.prefix), torch.arange(first, size)])
        return [_Pass(torch.arange(first)[None], {}), _Pass(second_L[None], {})]

    def batch(self) -> list[_Pass]:
        """Both rows, which have one length, in one pass."""
        return [_Pass(torch.cat([row.places_BL for row in self.alone()]), {})]

    def packed(self, state: _Recording, device: torch.device) -> list[_Pass]:
        """Both rows in one pass of tree attention."""
        position_S = torch.cat([torch.arange(self.prefix + self.ends[0]), self.prefix + torch.arange(self.ends[1])])
        return [_Pass(torch.arange(len(position_S))[None], {"position_ids": position_S[None].to(device), NAME: state})]


class _Computed(NamedTuple):
    """The numbers of one path."""

    logits_SV: Tensor
    gradients: Mapping[str, Tensor]
    """Projections of each parameter's gradient, with about its norm."""
    long_SH: Tensor
    """Hidden states of the long rows, after the first layers."""


class _Recording:
    """The tree attention of a `_Tree`, which records how it is called."""

    def __init__(self, tree: _Tree) -> None:
        self._blocks = plan_blocks(Forest(lengths=[tree.prefix, *tree.ends], parents=[-1, 0, 0]), limit=tree.limit)
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


def tree_geometry(model: Any, decoder: Any) -> Geometry:
    """Switch ``model`` to tree attention and compare it with its own. ``decoder``: its layers below the output layer.

    Raises `UnsupportedAttention` if tree attention does not fit; the model has it even then.
    """
    previous = model.config.get_text_config()._attn_implementation
    geometry, difference = _compared(model, decoder, stride=7)
    if difference is not None and has_experts(model):  # rounding can choose other experts, but hardly for two inputs
        model.set_attn_implementation(previous)
        geometry, difference = _compared(model, decoder, stride=11)
    if difference is not None:
        raise UnsupportedAttention(difference)
    return geometry


def has_experts(model: nn.Module) -> bool:
    """Whether a part of ``model`` chooses among experts."""
    return any("expert" in name or "router" in name for name, _ in model.named_parameters())


def _compared(model: Any, decoder: Any, stride: int) -> tuple[Geometry, str | None]:
    """The shape of attention, and how tree attention differs from the model's own. ``stride``: see `_tokens`."""
    config = model.config.get_text_config()
    short, long = _Tree(10, (6, 6), limit=8), _long_tree(config)
    short_S, long_S = _tokens(model, short, stride), _tokens(model, long, stride)
    with torch.enable_grad(), float32_layers(model):
        with _explained("its own forward or backward pass fails"):
            logits_SV, loss = _forward(model, short_S, short.batch())
            own = _Computed(logits_SV, _gradients(model, loss), _long_states(model, decoder, long_S, long.alone()))
        _switch(model)
        with _explained("it fails with another attention function"):
            recording = _Recording(short)
            passes = short.packed(recording, short_S.device)
            logits_SV, loss = _forward(model, short_S, passes, shared=short.prefix)
            geometry = recording.geometry(config)  # before the backward pass, which can call attention again
            long_SH = _long_states(model, decoder, long_S, long.packed(_Recording(long), long_S.device))
            tree = _Computed(logits_SV, _gradients(model, loss), long_SH)
    return geometry, _difference(own, tree, model.dtype)


def _switch(model: Any) -> None:
    """Make ``model`` call `attention`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise UnsupportedAttention(f"transformers cannot replace its attention: {error}") from error
    if model.config.get_text_config()._attn_implementation != NAME:
        raise UnsupportedAttention("it does not use transformers' AttentionInterface")


@contextmanager
def _explained(what: str) -> Generator[None]:
    """Turn errors of the model's code into `UnsupportedAttention`."""
    try:
        yield
    except (UnsupportedAttention, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UnsupportedAttention(f"{what}: {error}") from error


def _forward(model: Any, tokens_S: Tensor, passes: Sequence[_Pass], *, shared: int = 0) -> tuple[Tensor, Tensor]:
    """The logits [S, V], and a random linear function of the hidden states below the output layer.

    ``shared``: the number of first tokens that count twice, since both rows have them.
    """
    head = model.get_output_embeddings()
    vocabulary, width = head.weight.shape
    hidden_BLH: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: hidden_BLH.append(inputs[0].float()))
    weights_SH = torch.randn(len(tokens_S), width, generator=torch.Generator().manual_seed(0)).to(tokens_S.device)
    logits_SV = torch.zeros(len(tokens_S), vocabulary, device=tokens_S.device)
    loss = weights_SH.new_zeros(())
    try:
        for places_BL, keywords in passes:
            output = model(input_ids=tokens_S[places_BL], use_cache=False, **keywords)
            logits_SV[places_BL] = output.logits.detach().float()
            weighted_BLH = hidden_BLH.pop() * weights_SH[places_BL]
            loss = loss + weighted_BLH.sum() + weighted_BLH[:, :shared].sum()
    finally:
        hook.remove()
    return logits_SV, loss


def _gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Projections of the gradients of all parameters; each gradient is freed as soon as it is computed."""
    found: dict[str, Tensor] = {}

    def keep(parameter: Tensor, name: str) -> None:
        assert parameter.grad is not None
        found[name] = _project(parameter.grad)
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(keep, name=name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _project(gradient: Tensor) -> Tensor:
    """A vector, linear in ``gradient``, with about its norm; a small gradient as it is."""
    if gradient.numel() <= _PROJECTED_ROWS:
        return gradient.flatten().float()
    matrix = gradient.reshape(-1, gradient.shape[-1])
    rows, columns = matrix.shape
    left, right = _signs(rows).to(gradient.device), _signs(columns).to(gradient.device)
    sums = torch.zeros(_PROJECTIONS, columns, device=gradient.device)
    for part, signs in zip(matrix.split(_PROJECTED_ROWS), left.split(_PROJECTED_ROWS), strict=True):
        sums.addmm_(signs.T, part.float())
    return (sums @ right).flatten() / _PROJECTIONS


@cache
def _signs(size: int) -> Tensor:
    """Random signs [size, projections], the same in each process."""
    generator = torch.Generator().manual_seed(size)
    return torch.randint(2, (size, _PROJECTIONS), generator=generator).float() * 2 - 1


@torch.no_grad()
def _long_states(model: Any, decoder: Any, tokens_S: Tensor, passes: Sequence[_Pass]) -> Tensor:
    """The hidden states [S, H] of ``tokens_S`` after the first layers of the model."""
    width: int = model.get_output_embeddings().weight.shape[1]
    hidden_SH = torch.zeros(len(tokens_S), width, device=tokens_S.device)
    with _first_layers(model):
        for places_BL, keywords in passes:
            output = decoder(input_ids=tokens_S[places_BL], use_cache=False, **keywords)
            hidden_SH[places_BL] = output.last_hidden_state.float()
    return hidden_SH


@contextmanager
def _first_layers(model: Any) -> Generator[None]:
    """Leave out all layers after the first of each kind, at least two; all are computed if they cannot be found."""
    config = model.config.get_text_config()
    kinds: list[str] = list(getattr(config, "layer_types", None) or [])
    count = max(2, *(kinds.index(kind) + 1 for kind in kinds)) if kinds else 2
    found = [
        (holder, name, part)
        for holder in model.modules()
        for name, part in holder.named_children()
        if isinstance(part, nn.ModuleList) and len(part) == config.num_hidden_layers
    ]
    try:
        for holder, name, part in found:
            setattr(holder, name, part[:count])
        yield
    finally:
        for holder, name, part in found:
            setattr(holder, name, part)


def _difference(own: _Computed, tree: _Computed, dtype: torch.dtype) -> str | None:
    """Numbers that differ by more than rounding explains, or None. ``dtype``: of the weights."""
    # The last norm rounds hidden states to the type of the weights. In a narrow model a few of a row's are rounded to a neighbor.
    rounded = max(_TOLERANCE, torch.finfo(dtype).eps / 2)
    for what, found, expected, most in (
        ("logits", tree.logits_SV, own.logits_SV, _TOLERANCE),
        ("hidden states of long rows", tree.long_SH, own.long_SH, rounded),
    ):
        error = float((found - expected).abs().mean(-1).max() / expected.std())
        if not error < most:
            return f"it gives other {what} with tree attention (relative error {error:.2g})"
    noise = _NOISE * max(float(gradient.norm()) for gradient in own.gradients.values())
    # A gradient has the type of its weight, to which the parts of the two rows are rounded one by one.
    tolerance = max(_TOLERANCE, 3 * torch.finfo(dtype).eps)
    for name, gradient in {**tree.gradients, **own.gradients}.items():
        found, expected = (path.gradients.get(name, torch.zeros_like(gradient)) for path in (tree, own))
        size, error = float(expected.norm()), float((found - expected).norm())
        if not error <= tolerance * size + noise:
            how = f"relative error {error / max(size, noise):.2g}" if bool(found.any()) else "none"
            return f"it gives another gradient of {name!r} with tree attention ({how})"
    return None


def _long_tree(config: Any) -> _Tree:
    """Longer than a block of attention, if the model has as many positions."""
    limit = positions(config) or 512
    return _Tree(min(320, limit - 160), (64, 160), limit=BLOCK_TOKENS) if limit > 192 else _Tree(12, (8, 4), limit=8)


def _tokens(model: Any, tree: _Tree, stride: int) -> Tensor:
    """Different token ids for the places of ``tree``."""
    device = model.get_input_embeddings().weight.device
    size = tree.prefix + sum(tree.ends)
    return torch.arange(size, device=device) * stride % model.config.get_text_config().vocab_size
