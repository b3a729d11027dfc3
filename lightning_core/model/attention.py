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
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_core.errors import TrainingError
from lightning_core.model.forest import Block, Forest, plan_blocks, seen

NAME = "lightning"
"""The name of the attention function in transformers, and of the keyword for its state."""


_UNDERSTOOD = {NAME, "sliding_window", "position_ids", "use_cache", "is_causal"}
"""Arguments of attention functions that are computed with, or that only repeat what the model was called with."""


_ALIGNED = 128
"""Keys outside of a window are skipped in multiples of this number, so the order of sums does not depend on the queries of a block."""


MASK_ELEMENTS = 2**24
"""Most elements of a mask, and of the masks that are kept. torch copies the one in use, in the type of the queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of a model's attention."""

    layers: int
    kv_heads: int
    groups: int
    """Query heads per key/value head."""
    width: int


class AttentionState(Protocol):
    """The keys and values that each new token attends to."""

    def attend(
        self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """The attention output [S, H, D] of the new tokens in one layer.

        ``window``: a token attends to itself and to the ``window - 1`` positions before it; None: to all before it.
        """
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
    """The attention function that transformers calls in every layer; see `AttentionState`.

    Raises `UnsupportedAttention` for any argument that the state does not compute with: ignoring one would be silent.
    """
    state: AttentionState | None = kwargs.get(NAME)
    if state is None:  # there is no mask, so continuing would silently attend to future tokens
        raise UnsupportedAttention(
            f"it was called without the keyword {NAME!r}, or does not pass keywords to its attention"
        )
    if attention_mask is not None:  # transformers makes none for this function
        raise UnsupportedAttention("it makes a mask or bias of its own for its attention")
    for variation, value in kwargs.items():
        if variation not in _UNDERSTOOD and not variation.startswith("output_") and not _is_neutral(value):
            raise UnsupportedAttention(f"its attention uses {variation!r}")
    if kwargs.get("is_causal") is False:
        raise UnsupportedAttention("its attention is not causal")
    if key_1KSD.shape[2] != query_1HSD.shape[2]:
        raise UnsupportedAttention(f"its attention has {key_1KSD.shape[2]} keys for {query_1HSD.shape[2]} queries")
    scale = query_1HSD.shape[-1] ** -0.5 if scaling is None else scaling
    window: int | None = kwargs.get("sliding_window")
    output_SHD = state.attend(module.layer_idx, query_1HSD[0], key_1KSD[0], value_1KSD[0], scale, window)
    return output_SHD.unsqueeze(0), None


def _is_neutral(value: Any) -> bool:
    """Whether an argument changes nothing: an option that is not used, or a dropout of 0."""
    return value is None or (isinstance(value, bool | int | float) and not value)


class UnsupportedAttention(TrainingError):
    """The model's attention is not a plain scaled dot product.

    ``reason``: a clause about the model. The message is for calls that differ from those of the check at load, which reads the reason.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the model calls attention differently than at load, where tree attention fitted it: {self.reason}. Do not call it outside "
            "of Lightning or change it after load. If its code treats long rows differently, lower policy.max_context, or use another model"
        )


def causal(tokens: int, *, groups: int, device: torch.device) -> TreeAttention:
    """The attention of a single sequence."""
    return TreeAttention(plan_blocks(Forest(lengths=[tokens], parents=[-1])), groups=groups, device=device)


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
        self._blocks = blocks
        self._groups = groups
        self._device = device
        self._prefixes = prefixes
        self._pieces: dict[int | None, list[_Piece]] = {}
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        """The masks that are kept, by window and first query."""
        self._kept = 0

    def attend(
        self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        return _Attend.apply(query_HSD, key_KSD, value_KSD, self, layer, scaling, window)  # type: ignore[no-any-return]

    def pieces(
        self, layer: int, window: int | None, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor
    ) -> Iterator[tuple[_Piece, Tensor | None, Tensor, Tensor, Tensor]]:
        """Each piece with its mask, bool [G s, U], queries [H, s, D], keys and values [K, U, D].

        The mask is None for whole sequences, in which each token attends to all before it.
        """
        if window not in self._pieces:
            self._pieces[window] = self._cut(window)
        for piece in self._pieces[window]:
            keys = [key_KSD[:, a:b] for a, b in piece.ranges]
            values = [value_KSD[:, a:b] for a, b in piece.ranges]
            if self._prefixes is not None:
                keys = [k[layer] for k, _ in self._prefixes[piece.prefix]] + keys
                values = [v[layer] for _, v in self._prefixes[piece.prefix]] + values
            query = query_HSD[:, piece.start : piece.stop]
            mask = None if piece.block is None else self._mask(piece, piece.block, window)
            yield piece, mask, query, _join(keys, piece.skipped), _join(values, piece.skipped)

    def _cut(self, window: int | None) -> list[_Piece]:
        """The blocks, joined where they need no mask, and cut where their masks would be large."""
        pieces: list[_Piece] = []
        for block in self._blocks:
            sequence = self._sequence(block, pieces[-1] if pieces else None, window)
            if sequence is not None:
                if sequence.start < block.start:
                    pieces.pop()
                pieces.append(sequence)
                continue
            ranges, before = seen(block), self._keys_before(block)
            keys = before + block.stop - block.start
            rows = max(1, MASK_ELEMENTS // (self._groups * keys))
            for start in range(block.start, block.stop, rows):
                stop = min(start + rows, block.stop)
                skipped = 0
                if window is not None:
                    first = before + int(block.mask_SS[start - block.start : stop - block.start].sum(axis=1).min()) - 1
                    skipped = max(0, min(before, first - window + 1))
                    skipped -= skipped % _ALIGNED
                pieces.append(_Piece(start, stop, block, block.prefix, ranges, skipped))
        return pieces

    def _sequence(self, block: Block, last: _Piece | None, window: int | None) -> _Piece | None:
        """The piece of ``block``, joined with the ``last`` one if it continues that; None if it needs a mask.

        It needs none if each token attends to all before it in a contiguous range. On a GPU it always has one: which of its kernels
        take grouped queries without a mask depends on the type of the numbers.
        """
        ranges = seen(block)
        tokens = ranges[0][1] - ranges[0][0]
        plain = block.linear and len(ranges) == 1 and self._keys_before(block) == tokens - (block.stop - block.start)
        if self._device.type != "cpu" or not plain or (window is not None and tokens > window):
            return None
        start = ranges[0][0]
        if start < block.start and (last is None or last.block is not None or last.start != start):
            return None
        return _Piece(start, block.stop, None, block.prefix, ranges, 0)

    def _keys_before(self, block: Block) -> int:
        before = sum(stop - start for start, stop in block.ancestors)
        if self._prefixes is not None:
            before += sum(keys.shape[2] for keys, _ in self._prefixes[block.prefix])
        return before

    def _mask(self, piece: _Piece, block: Block, window: int | None) -> Tensor:
        """bool [G s, U]. Few are kept for the next layers: all masks together are quadratic in the length of a row."""
        if (window, piece.start) in self._masks:
            return self._masks[window, piece.start]
        before = self._keys_before(block)
        rows = slice(piece.start - block.start, piece.stop - block.start)
        own = block.mask_SS[rows]
        mask = np.ones((len(own), before + own.shape[1] - piece.skipped), dtype=bool)
        mask[:, -own.shape[1] :] = own
        if window is not None:
            # A token sees itself and all tokens of its path, so their number is its position.
            position_S = before + block.mask_SS.sum(axis=1) - 1
            position_U = np.concatenate([np.arange(piece.skipped, before), position_S])
            mask &= position_S[rows, None] - position_U[None, :] < window
        # The heads of a group are stacked along the queries: grouped-query attention without repeating K and V.
        tiled = torch.from_numpy(mask).to(self._device).repeat(self._groups, 1)
        if self._kept + tiled.numel() <= MASK_ELEMENTS:
            self._kept += tiled.numel()
            self._masks[window, piece.start] = tiled
        return tiled


class _Piece(NamedTuple):
    """Queries that are computed together, and the keys that they attend to."""

    start: int
    stop: int
    block: Block | None
    """The block of the queries; None: a whole sequence of one or several blocks."""
    prefix: int
    ranges: tuple[tuple[int, int], ...]
    """Of the packed sequence; the block's own tokens are last."""
    skipped: int
    """Leading keys that are outside of the window of all queries."""


class _Attend(torch.autograd.Function):
    """Attention block by block; only the inputs are saved for the backward pass.

    With plain autograd every block would save a copy of all keys and values that it attends to, and each slice
    would have a gradient as long as the whole sequence: memory and time would be quadratic in its length. Instead, the
    backward pass recomputes each block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_HSD: Tensor,
        key_KSD: Tensor,
        value_KSD: Tensor,
        tree: TreeAttention,
        layer: int,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(query_HSD, key_KSD, value_KSD)
        ctx.tree, ctx.layer, ctx.scaling, ctx.window = tree, layer, scaling, window
        heads, tokens, width = query_HSD.shape
        output_SHD = query_HSD.new_empty(tokens, heads, width)
        for piece, mask, query, keys, values in tree.pieces(layer, window, query_HSD, key_KSD, value_KSD):
            output_SHD[piece.start : piece.stop] = _attend_piece(query, keys, values, mask, scaling)
        return output_SHD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_SHD,) = grad_outputs
        inputs: tuple[Tensor, Tensor, Tensor] = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in inputs)
        for piece, mask, *parts in ctx.tree.pieces(ctx.layer, ctx.window, *inputs):
            with torch.enable_grad():
                leaves = [part.detach().requires_grad_() for part in parts]
                output = _attend_piece(leaves[0], leaves[1], leaves[2], mask, ctx.scaling)
            gradients = torch.autograd.grad(output, leaves, grad_SHD[piece.start : piece.stop])
            grad_query[:, piece.start : piece.stop] = gradients[0]
            # Columns are aligned at the end: a cached prefix comes first, and a window skips leading ones.
            column = gradients[1].shape[1] - sum(stop - start for start, stop in piece.ranges)
            for start, stop in piece.ranges:
                first, end = max(0, column), column + stop - start
                if end > 0:
                    grad_key[:, start + first - column : stop] += gradients[1][:, first:end]
                    grad_value[:, start + first - column : stop] += gradients[2][:, first:end]
                column = end
        return grad_query, grad_key, grad_value, None, None, None, None


def _attend_piece(
    query_HsD: Tensor, keys_KUD: Tensor, values_KUD: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """The attention output [s, H, D] of one piece's queries."""
    heads, tokens, width = query_HsD.shape
    kv_heads = len(keys_KUD)
    if mask is None:
        grouped = (kv_heads, heads // kv_heads, tokens, width)
        keys, values = (tensor.unsqueeze(1).expand(grouped) for tensor in (keys_KUD, values_KUD))
        query = query_HsD.reshape(grouped)
        output = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
    else:
        output = F.scaled_dot_product_attention(
            query_HsD.reshape(1, kv_heads, -1, width),
            keys_KUD.unsqueeze(0),
            values_KUD.unsqueeze(0),
            attn_mask=mask,
            scale=scaling,
        )
    return output.reshape(heads, tokens, width).transpose(0, 1)


def _join(parts: Sequence[Tensor], skipped: int) -> Tensor:
    """The parts [K, n, D] as one, without its first ``skipped`` tokens."""
    left: list[Tensor] = []
    for part in parts:
        if skipped < part.shape[1]:
            left.append(part[:, skipped:])
        skipped = max(0, skipped - part.shape[1])
    return torch.cat(left, dim=1) if len(left) > 1 else left[0]
