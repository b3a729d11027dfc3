"""Attention over a packed forest of token runs, behind transformers' own modules.

All tokens pass through the unmodified Hugging Face model as one packed sequence ``[1, S]``. The attention function
registered below decides which tokens attend to which; the model builds no mask. The caller passes the attention state as a
keyword: ``model(input_ids=…, position_ids=…, lightning=state)``.

A forest is stored in depth-first order. Every subtree is then one contiguous range of the packed sequence, and the tokens
before it that it attends to are a short list of ranges. `plan_blocks` cuts a forest into blocks of queries that share those
ranges, so attention costs about as much as for separate causal sequences, but a shared prefix is computed once. (Tree
training, arXiv 2511.00413, and cascade inference use the same structure.)

Dimensions: S packed tokens, H query heads, K key/value heads, G = H / K, D head width, U keys that a block attends to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lightning_core.errors import TrainingError

NAME = "lightning"
"""The name of the attention function in transformers, and of the keyword for its state."""

BLOCK_TOKENS = 256
"""Siblings with at most this many tokens form one block: one dense product is cheaper than several small kernels."""


class AttentionState(Protocol):
    """The keys and values that each new token attends to."""

    def attend(self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float) -> Tensor:
        """The attention output [S, H, D] of the new tokens in one layer."""
        ...


def attention(
    module: Any,
    query_1HSD: Tensor,
    key_1KSD: Tensor,
    value_1KSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer; see `AttentionState`."""
    state: AttentionState | None = kwargs.get(NAME)
    if state is None:  # there is no mask, so continuing would silently attend to future tokens
        raise TrainingError(f"a model switched to {NAME!r} attention was called without the keyword {NAME!r}")
    for variation in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(variation) is not None:
            raise TrainingError(
                f"{type(module).__name__} in layer {module.layer_idx} uses {variation!r}: the embedded engine "
                "supports only plain full attention"
            )
    scale = query_1HSD.shape[-1] ** -0.5 if scaling is None else scaling
    output_SHD = state.attend(module.layer_idx, query_1HSD[0], key_1KSD[0], value_1KSD[0], scale)
    return output_SHD.unsqueeze(0), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of a model's attention."""

    layers: int
    kv_heads: int
    groups: int
    """Query heads per key/value head."""
    width: int


def use_lightning_attention(model: Any) -> Geometry:
    """Switch ``model`` to tree attention, and check the result on a few tokens.

    Raises `TrainingError` if a layer is not plain full attention, or if the result differs from the model's own.
    """
    from transformers import AttentionInterface

    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise TrainingError(
            f"{type(model).__name__} has layers of the types {sorted(kinds)}: the embedded engine supports only "
            "models whose layers are all 'full_attention'; use another trainer for this model"
        )
    AttentionInterface.register(NAME, attention)
    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(24, device=device)[None] * 7 % config.vocab_size
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits.float()
        if not bool(expected.isfinite().all()):
            raise TrainingError(_not_finite(model))
        model.set_attn_implementation(NAME)
        if config._attn_implementation != NAME:
            raise TrainingError(f"{type(model).__name__} does not use transformers' AttentionInterface")
        probe = _Probe(plan_blocks(Forest(lengths=[16, 8], parents=[-1, 0]), limit=8))
        positions = torch.arange(24, device=device)[None]
        found = model(input_ids=tokens, position_ids=positions, use_cache=False, **{NAME: probe}).logits.float()
    error = ((found - expected).abs().mean() / expected.std()).item()
    if probe.geometry is None or not error < 0.05:
        raise TrainingError(
            f"{type(model).__name__} gives other logits with tree attention (relative error {error:.3g}): "
            "its attention is not the plain scaled dot product that the embedded engine supports"
        )
    return probe.geometry


def _not_finite(model: Any) -> str:
    """The message for a model whose logits are not finite."""
    wrong = [name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all())]
    cause = (
        f"{len(wrong)} of its weights contain NaN or infinity, such as {wrong[0]!r}; use an undamaged copy of the model"
        if wrong
        else f"its weights are finite, so {model.dtype} overflows; set policy.dtype to another type"
    )
    return f"the logits of {type(model).__name__} are not finite: {cause}"


class _Probe:
    """Tree attention that records the model's geometry."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self.geometry: Geometry | None = None

    def attend(self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float) -> Tensor:
        groups = query_HSD.shape[0] // key_KSD.shape[0]
        self.geometry = Geometry(layers=layer + 1, kv_heads=key_KSD.shape[0], groups=groups, width=key_KSD.shape[2])
        tree = TreeAttention(self._blocks, groups=groups, device=key_KSD.device)
        return tree.attend(layer, query_HSD, key_KSD, value_KSD, scaling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Runs of tokens in depth-first order.

    Run i has ``lengths[i]`` tokens and continues run ``parents[i]``.
    """

    lengths: Sequence[int]
    parents: Sequence[int]
    """Index of the run that this one continues, smaller than its own; -1 for a root."""
    prefixes: Sequence[int] = ()
    """For each root, the cached prefix that it continues; roots of one prefix are adjacent. Empty: no prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The queries ``start:stop`` and the keys they attend to.

    These are the cached prefix, the ranges ``ancestors`` and, through the mask, the block's own.
    """

    start: int
    stop: int
    prefix: int
    """Index of the cached prefix before the block's root."""
    ancestors: tuple[tuple[int, int], ...]
    mask_SS: NDArray[np.bool_]


def plan_blocks(forest: Forest, *, limit: int = BLOCK_TOKENS) -> list[Block]:
    """Cut a forest into blocks, so that each token is in exactly one."""
    lengths, parents = _split_long_runs(forest, limit)
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    sizes = list(lengths)  # tokens of each run's subtree
    children: list[list[int]] = [[] for _ in lengths]
    roots: list[int] = []
    for run in reversed(range(len(lengths))):
        if parents[run] >= 0:
            sizes[parents[run]] += sizes[run]
    for run, parent in enumerate(parents):
        (children[parent] if parent >= 0 else roots).append(run)

    blocks: list[Block] = []

    def emit(first: int, stop: int, prefix: int, ancestors: tuple[tuple[int, int], ...]) -> None:
        """Append the block of the runs from ``first`` on whose tokens end at ``stop``."""
        start = starts[first]
        mask = np.zeros((stop - start, stop - start), dtype=bool)
        run = first
        while run < len(lengths) and starts[run] < stop:
            a, b = starts[run] - start, starts[run + 1] - start
            if parents[run] >= first:  # attends to all that its parent's last token attends to
                mask[a:b] = mask[starts[parents[run] + 1] - start - 1]
            mask[a:b, a:b] = np.tri(b - a, dtype=bool)
            run += 1
        blocks.append(Block(start=start, stop=stop, prefix=prefix, ancestors=ancestors, mask_SS=mask))

    stack: list[tuple[list[int], tuple[tuple[int, int], ...], int]] = []
    for prefix, members in groupby(
        enumerate(roots), key=lambda item: forest.prefixes[item[0]] if forest.prefixes else 0
    ):
        stack.append(([root for _, root in members], (), prefix))
    while stack:
        siblings, ancestors, prefix = stack.pop()
        first = -1
        stop = 0
        for run in siblings:
            end = starts[run] + sizes[run]
            if first >= 0 and (end - starts[first] > limit):
                emit(first, stop, prefix, ancestors)
                first = -1
            if sizes[run] > limit:
                emit(run, starts[run + 1], prefix, ancestors)
                stack.append((children[run], _append(ancestors, (starts[run], starts[run + 1])), prefix))
            else:
                first, stop = (run if first < 0 else first), end
        if first >= 0:
            emit(first, stop, prefix, ancestors)
    return sorted(blocks, key=lambda block: block.start)


def _append(ranges: tuple[tuple[int, int], ...], new: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    if ranges and ranges[-1][1] == new[0]:
        return (*ranges[:-1], (ranges[-1][0], new[1]))
    return (*ranges, new)


def _split_long_runs(forest: Forest, limit: int) -> tuple[list[int], list[int]]:
    """The same forest with runs of at most ``limit`` tokens, which bounds the masks."""
    lengths: list[int] = []
    parents: list[int] = []
    last_piece: list[int] = []
    for length, parent in zip(forest.lengths, forest.parents, strict=True):
        above = last_piece[parent] if parent >= 0 else -1
        for offset in range(0, length, limit):
            parents.append(above)
            lengths.append(min(limit, length - offset))
            above = len(lengths) - 1
        last_piece.append(above)
    return lengths, parents


class TreeAttention:
    """Attention of a packed forest; differentiable."""

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        groups: int,
        device: torch.device,
        prefixes: Sequence[Sequence[tuple[Tensor, Tensor]]] | None = None,
    ) -> None:
        """``groups``: query heads per key/value head.

        ``prefixes``: cached keys and values before the roots, each a sequence of (keys, values) [layers, K, n, D].
        """
        self._prefixes = prefixes
        self._blocks: list[tuple[Block, Tensor]] = []
        for block in blocks:
            before = sum(stop - start for start, stop in block.ancestors)
            if prefixes is not None:
                before += sum(keys.shape[2] for keys, _ in prefixes[block.prefix])
            # The heads of a group are stacked along the queries: grouped-query attention without repeating K and V.
            mask = np.pad(block.mask_SS, ((0, 0), (before, 0)), constant_values=True)
            self._blocks.append((block, torch.from_numpy(np.tile(mask, (groups, 1))).to(device)))

    def attend(self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float) -> Tensor:
        return _Attend.apply(query_HSD, key_KSD, value_KSD, self, layer, scaling)  # type: ignore[no-any-return]

    def blocks(
        self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor
    ) -> Iterator[tuple[Block, Tensor, Tensor, Tensor, Tensor]]:
        """Each block with its mask, queries [H, s, D], keys and values [K, U, D]."""
        for block, mask in self._blocks:
            ranges = _seen(block)
            keys = [key_KSD[:, a:b] for a, b in ranges]
            values = [value_KSD[:, a:b] for a, b in ranges]
            if self._prefixes is not None:
                keys = [k[layer] for k, _ in self._prefixes[block.prefix]] + keys
                values = [v[layer] for _, v in self._prefixes[block.prefix]] + values
            query = query_HSD[:, block.start : block.stop]
            yield block, mask, query, _join(keys), _join(values)


class _Attend(torch.autograd.Function):
    """Attention block by block; only the inputs are saved for the backward pass.

    With plain autograd every block would save a copy of all keys and values that it attends to, and each slice of them
    would have a gradient as long as the whole sequence: memory and time would be quadratic in its length. Instead, the
    backward pass recomputes each block.
    """

    @staticmethod
    def forward(
        ctx: Any, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, tree: TreeAttention, layer: int, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(query_HSD, key_KSD, value_KSD)
        ctx.tree, ctx.layer, ctx.scaling = tree, layer, scaling
        heads, tokens, width = query_HSD.shape
        output_SHD = query_HSD.new_empty(tokens, heads, width)
        for block, mask, query, keys, values in tree.blocks(layer, query_HSD, key_KSD, value_KSD):
            output_SHD[block.start : block.stop] = _attend_block(query, keys, values, mask, scaling)
        return output_SHD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_SHD,) = grad_outputs
        inputs: tuple[Tensor, Tensor, Tensor] = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in inputs)
        for block, mask, *parts in ctx.tree.blocks(ctx.layer, *inputs):
            with torch.enable_grad():
                leaves = [part.detach().requires_grad_() for part in parts]
                output = _attend_block(leaves[0], leaves[1], leaves[2], mask, ctx.scaling)
            found = torch.autograd.grad(output, leaves, grad_SHD[block.start : block.stop])
            grad_query[:, block.start : block.stop] = found[0]
            ranges = _seen(block)
            column = found[1].shape[1] - sum(stop - start for start, stop in ranges)  # after the cached prefix
            for start, stop in ranges:
                columns = slice(column, column := column + stop - start)
                grad_key[:, start:stop] += found[1][:, columns]
                grad_value[:, start:stop] += found[2][:, columns]
        return grad_query, grad_key, grad_value, None, None, None


def _seen(block: Block) -> tuple[tuple[int, int], ...]:
    """The ranges of the packed sequence that a block attends to; its own is last."""
    return _append(block.ancestors, (block.start, block.stop))


def _attend_block(query_HsD: Tensor, keys_KUD: Tensor, values_KUD: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """The attention output [s, H, D] of one block's queries."""
    heads, tokens, width = query_HsD.shape
    output = F.scaled_dot_product_attention(
        query_HsD.reshape(1, len(keys_KUD), -1, width),
        keys_KUD.unsqueeze(0),
        values_KUD.unsqueeze(0),
        attn_mask=mask,
        scale=scaling,
    )
    return output.view(heads, tokens, width).transpose(0, 1)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]
