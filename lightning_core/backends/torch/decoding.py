"""One decoding step for many rows: cascade attention over shared and own keys.

Rows that are decoded together mostly share their prompts (a system prompt, the samples of one group). The common keys are
stored once in a *shared* block, which all rows multiply with in one dense product, masked per row. The rest of a row (its
response, long private context) is in the row's *own* block. One softmax covers the scores of both. (Cascade inference: Ye
et al. 2024, "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding"; Hydragen, arXiv 2402.05099.)

Dimensions: R rows, H query heads, K key/value heads, G = H / K, D head width, L layers, C shared columns, N own columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_core.backends.torch.kv_pool import KVPool, Node, cached
from lightning_core.backends.torch.layout import Layout, resized
from lightning_core.backends.torch.rows import GROWTH
from lightning_core.model.attention import Geometry

OWN_COST = 4
"""Cost of a column in the own blocks, relative to a column of the shared block.

A shared column is part of a dense product over all rows; an own column is read from memory once per row. Per layer and row
this is H * (4 D flops + a softmax) against K * 2 D numbers read: by arithmetic about 4 to 1 on a CPU, and similar on a GPU.
On a CPU this value sampled faster than either extreme in all two-turn workloads that were measured."""


_KEPT_BYTES = 2**30
_LESS_GROWTH = 32
"""Tokens that each row can sample after others have left."""


class Cascade:
    """Keys and values of the running rows 0 … R-1.

    When a row is removed, the last row moves to its place.

    `most_bytes` bounds the blocks of two and more rows; a single row has what it needs. The caller adds a row only if it fits
    (`forecast`, `add`), and removes rows before a step that would not fit (`fits_step`).
    """

    _unit = 1
    """The width of a step's own columns is a multiple of it."""

    def __init__(
        self, geometry: Geometry, *, dtype: torch.dtype, device: torch.device, own_cost: float = OWN_COST
    ) -> None:
        self._geometry = geometry
        self._dtype, self._device = dtype, device
        self._own_cost = own_cost
        self.most_bytes: int | None = None
        """Bytes that `nbytes` may reach with two and more rows; None: no bound. While a block grows, half as much is held in addition."""
        self._token_bytes = 2 * geometry.layers * geometry.kv_heads * geometry.width * dtype.itemsize
        self.clear()

    def clear(self) -> None:
        """Drop all rows and columns and free their memory.

        The caller must reset the columns of its nodes.
        """
        layers, kv_heads, width = self._geometry.layers, self._geometry.kv_heads, self._geometry.width
        options: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        self.rows = 0
        self.columns = 0
        self._shared_LKCD = [torch.zeros(layers, kv_heads, 0, width, **options) for _ in "kv"]
        self._own_LRKND = [torch.zeros(layers, 0, kv_heads, 0, width, **options) for _ in "kv"]
        # Added to the scores: 0 where a row attends to a shared column, else -inf.
        self._visible_RC = torch.zeros(0, 0, device=self._device)
        self._position_C = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._lengths_R = torch.zeros(0, dtype=torch.int64, device=self._device)
        # The same as Python numbers; the maximum length of each row's own context; the shared columns of each row, and
        # their number, which is the position of the row's first own token.
        self._lengths: list[int] = []
        self._bases: list[int] = []
        self._limits: list[int] = []
        self._used: list[list[tuple[int, int]]] = []
        self._users = torch.zeros(0, dtype=torch.int64)

    def reset(self) -> None:
        """`clear`, but keep up to 1 GiB for the next rows: its values are finite, and masked until they are overwritten."""
        if self.nbytes > _KEPT_BYTES or self.oversized:
            self.clear()
            return
        self.rows = self.columns = 0
        self._users.zero_()
        for per_row in (self._lengths, self._bases, self._limits, self._used):
            per_row.clear()

    def reserve(self, rows: int) -> None:
        """Make room for so many rows at once: growing copies all keys and values."""
        self._reserve(Layout(rows=rows, own=1))

    # Rows come and go -----------------------------------------------------------------------------------------------

    def add(self, path: Sequence[Node], shared_by: Sequence[int], room: int) -> bool:
        """Append a row with the context ``path`` and at most ``room`` further tokens; False if it does not fit beside the others.

        ``shared_by[i]``: how many of the rows that are being added use ``path[i]``.
        """
        for first in self._splits(path, shared_by, room):
            own, columns = _count(path[first:]), self.columns + _count(n for n in path[:first] if n.column is None)
            if self.rows and not self._fits(self._with_row(self.layout(), own=own, columns=columns, room=room)):
                continue
            ranges: list[tuple[int, int]] = []
            for node in path[:first]:
                start = self._place(node)
                ranges.append((start, start + len(node.tokens)))
            self._append(path[first:], ranges, room)
            return True
        return False

    def _splits(self, path: Sequence[Node], shared_by: Sequence[int], room: int) -> Sequence[int]:
        """Numbers of nodes of ``path`` that may go to the shared block, the cheapest first."""
        unshared = (
            i for i, (node, users) in enumerate(zip(path, shared_by, strict=True)) if node.column is None and users < 2
        )
        first = next(unshared, len(path))
        own = _count(path[first:])
        if not own:
            return [first]
        placed = next(i for i, node in enumerate(path) if node.column is None)
        return [first, len(path), placed] if self._keep_apart(own, room) else [len(path), first, placed]

    def _append(self, private: Sequence[Node], ranges: list[tuple[int, int]], room: int) -> None:
        """Append a row that attends to the shared columns ``ranges``, then to ``private``, which is copied to its own block."""
        row = self.rows
        own = _count(private)
        self._limits.append(own + room)
        self._reserve(Layout(rows=row + 1, own=own + 1))
        self._visible_RC[row].fill_(-torch.inf)
        for start, stop in ranges:
            self._visible_RC[row, start:stop] = 0
            self._users[start:stop] += 1
        if private:
            keys, values = zip(*cached(private), strict=True)
            for block, new in zip(self._own_LRKND, (keys, values), strict=True):
                block[:, row, :, :own] = torch.cat(new, dim=2)
        self._lengths_R[row] = own
        self._lengths.append(own)
        self._bases.append(sum(stop - start for start, stop in ranges))
        self._used.append(ranges)
        self.rows += 1

    def remove(self, row: int) -> None:
        """Remove a row; the last row gets its number."""
        for start, stop in self._used[row]:
            self._users[start:stop] -= 1
        last = self.rows - 1
        if row != last:
            length = self._lengths[last]
            for block in self._own_LRKND:
                block[:, row, :, :length] = block[:, last, :, :length]
            self._visible_RC[row] = self._visible_RC[last]
            self._lengths_R[row] = length
            self._lengths[row], self._limits[row], self._used[row] = length, self._limits[last], self._used[last]
            self._bases[row] = self._bases[last]
        for per_row in (self._lengths, self._bases, self._limits, self._used):
            per_row.pop()
        self.rows = last

    def own(self, row: int) -> tuple[Tensor, Tensor]:
        """Views of the row's own keys and values, [layers, K, n, D]."""
        keys, values = (block[:, row, :, : self._lengths[row]] for block in self._own_LRKND)
        return keys, values

    def compact(self, pool: KVPool, *, all_unused: bool = False) -> bool:
        """Drop unused shared columns once they are the majority, or with ``all_unused`` in any case. Whether any were dropped."""
        keep = torch.nonzero(self._users[: self.columns]).squeeze(1)
        few = self.columns < 256 or 2 * len(keep) > self.columns
        if len(keep) == self.columns or (few and not all_unused):
            return False
        place = torch.full((self.columns,), -1, dtype=torch.int64)
        place[keep] = torch.arange(len(keep))
        index = place.tolist()
        for node in pool.nodes():
            if node.column is not None:
                node.column = index[node.column] if index[node.column] >= 0 else None
        self._used = [[(index[start], index[start] + stop - start) for start, stop in ranges] for ranges in self._used]
        self._users[: len(keep)] = self._users[keep]
        self._users[len(keep) :] = 0
        keep = keep.to(self._device)
        for block in self._shared_LKCD:
            block[:, :, : len(keep)] = block[:, :, keep]
        self._visible_RC[:, : len(keep)] = self._visible_RC[:, keep]
        self._position_C[: len(keep)] = self._position_C[keep]
        self.columns = len(keep)
        return True

    # A step -------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare a step that adds one token to each row."""
        rows = self.rows
        self._width = self._rounded(max(self._lengths) + 1)
        self._reserve(Layout(rows=rows, own=self._width))
        self._row_index = torch.arange(rows, device=self._device)
        self._at = self._lengths_R[:rows].clone()
        self._biases: dict[int | None, Tensor] = {}

    def _bias(self, window: int | None) -> Tensor:
        """[R, 1, 1, C + N], added to the scores: 0 where a row attends to a column within ``window``, else -inf."""
        if window not in self._biases:
            rows, columns = self.rows, self.columns
            ahead_RN = torch.arange(self._width, device=self._device)[None] - self._at[:, None]
            hidden_RN = ahead_RN > 0
            shared_RC = self._visible_RC[:rows, :columns]
            if window is not None:
                hidden_RN |= ahead_RN <= -window
                position_R = self._at + torch.tensor(self._bases, device=self._device)
                outside_RC = position_R[:, None] - self._position_C[None, :columns] >= window
                shared_RC = shared_RC.masked_fill(outside_RC, -torch.inf)
            own_RN = torch.zeros(ahead_RN.shape, device=self._device).masked_fill_(hidden_RN, -torch.inf)
            self._biases[window] = torch.cat([shared_RC, own_RN], dim=1)[:, None, None]
        return self._biases[window]

    def attend(
        self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """See `AttentionState.attend`; S is the number of rows."""
        heads, rows, width = query_HSD.shape
        kv_heads = key_KSD.shape[0]
        groups, columns, own = heads // kv_heads, self.columns, self._width
        shared_k, shared_v = (block[layer, :, :columns] for block in self._shared_LKCD)
        own_k, own_v = self._store(layer, key_KSD, value_KSD)

        # Scores and softmax in float32, as in the trainer's kernels: bfloat16 scores have errors of percents.
        query_KGRD = (query_HSD.float() * scaling).view(kv_heads, groups, rows, width)
        query_RKGD = query_KGRD.permute(2, 0, 1, 3)
        scores_own = torch.bmm(query_RKGD.reshape(rows * kv_heads, groups, width), own_k.float().transpose(1, 2))
        scores_own = scores_own.view(rows, kv_heads, groups, own)
        scores = torch.bmm(query_KGRD.reshape(kv_heads, groups * rows, width), shared_k.float().transpose(1, 2))
        scores = scores.view(kv_heads, groups, rows, columns).permute(2, 0, 1, 3)
        weights = torch.cat([scores, scores_own], dim=-1).add_(self._bias(window)).softmax(dim=-1).to(value_KSD.dtype)
        weights_shared = weights[..., :columns].permute(1, 2, 0, 3).reshape(kv_heads, groups * rows, columns)
        output = torch.bmm(weights_shared, shared_v).view(kv_heads, groups, rows, width).permute(2, 0, 1, 3)
        output_own = torch.bmm(weights[..., columns:].reshape(rows * kv_heads, groups, own), own_v)
        # Contiguous, because some models view the result with other dimensions.
        return (output + output_own.view(rows, kv_heads, groups, width)).reshape(rows, heads, width).contiguous()

    def _store(self, layer: int, key_KSD: Tensor, value_KSD: Tensor) -> tuple[Tensor, Tensor]:
        """Add the step's keys and values to the own blocks; returns these, [R K, N, D]."""
        for block, new in zip(self._own_LRKND, (key_KSD, value_KSD), strict=True):
            block[layer, self._row_index, :, self._at] = new.transpose(0, 1)
        keys, values = (block[layer, : self.rows, :, : self._width].flatten(0, 1) for block in self._own_LRKND)
        return keys, values

    def end(self) -> None:
        """Add the step's tokens to the rows' lengths."""
        self._lengths_R[: self.rows] += 1
        self._lengths = [length + 1 for length in self._lengths]

    # Memory ---------------------------------------------------------------------------------------------------------

    def _keep_apart(self, own: int, room: int) -> bool:
        """Whether an unshared context of ``own`` tokens is cheaper in the row's own block.

        All own blocks are as wide as the widest. Widening them is expensive for the first row and free for later rows of
        the same length. Unshared context therefore goes to the shared block until the columns there have cost as much as
        widening would. This costs at most twice as much as the better choice for any later rows. Wider blocks take at most half of
        the bound, so that memory is left for later rows.
        """
        wider = max(0, own + room - max(self._limits, default=room))
        twice = Layout(rows=2 * (self.rows + 1), own=own + room, columns=2 * self.columns)
        if wider and not self._fits(twice):
            return False
        unshared_columns = int((self._users[: self.columns] == 1).sum())
        return unshared_columns >= self._own_cost * wider

    def _place(self, node: Node) -> int:
        """The node's first column in the shared block; copies the node there if it is not in it."""
        if node.column is not None:
            return node.column
        start, stop = self.columns, self.columns + len(node.tokens)
        self._reserve(Layout(columns=stop))
        for block, new in zip(self._shared_LKCD, *cached([node]), strict=True):
            block[:, :, start:stop] = new
        self._visible_RC[: self.rows, start:stop] = -torch.inf
        position = sum(len(above.tokens) for above in node.path()[:-1])
        self._position_C[start:stop] = torch.arange(position, position + len(node.tokens))
        node.column, self.columns = start, stop
        return start

    # The bound --------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes that the blocks hold."""
        return sum(block.nbytes for block in (*self._shared_LKCD, *self._own_LRKND, self._visible_RC))

    @property
    def oversized(self) -> bool:
        """Whether the blocks hold more than the bound, as after a long row that ran alone."""
        return self.most_bytes is not None and self.nbytes > self.most_bytes

    def layout(self) -> Layout:
        """The sizes that the rows need, with room for a number of further tokens."""
        return Layout(rows=self.rows, own=self._grown_width(GROWTH), columns=self.columns)

    def forecast(self, layout: Layout, path: Sequence[Node], new: int, room: int) -> Layout | None:
        """``layout`` with one more row; None if it does not fit.

        ``path``, ``room``: see `add`. ``new``: tokens of ``path`` that no row of ``layout`` has.
        """
        choices = (
            self._with_row(layout, own=own, columns=layout.columns + columns, room=room)
            for own, columns in self._choices(path, new)
        )
        return next((choice for choice in choices if self._fits(choice)), None)

    def fits_step(self, *, rows_left: bool) -> bool:
        """Whether a step fits. ``rows_left``: whether rows have just left for it; then some further steps must fit too."""
        own = self._grown_width(_LESS_GROWTH if rows_left else 1)
        return self._fits(Layout(rows=self.rows, own=own, columns=self.columns))

    def _choices(self, path: Sequence[Node], new: int) -> Sequence[tuple[int, int]]:
        """Own and shared columns that a row with ``new`` tokens can get."""
        return [(0, new), (new, 0)]

    def _with_row(self, layout: Layout, *, own: int, columns: int, room: int) -> Layout:
        width = self._rounded(own + max(1, min(room, GROWTH)))
        return Layout(rows=layout.rows + 1, own=max(layout.own, width), columns=columns)

    def _grown_width(self, growth: int) -> int:
        """Own columns for ``growth`` further tokens of each row that may have so many."""
        rows = zip(self._lengths, self._limits, strict=True)
        return self._rounded(max((max(length + 1, min(length + growth, limit)) for length, limit in rows), default=0))

    def _rounded(self, width: int) -> int:
        return width + -width % self._unit

    def _fits(self, layout: Layout) -> bool:
        return self.most_bytes is None or layout.nbytes(self._token_bytes) <= self.most_bytes

    def _reserve(self, needed: Layout) -> None:
        """Make the blocks as large as ``needed``. They get larger than that if it fits, because growing copies them."""
        rows, own, columns = self._own_LRKND[0].shape[1], self._own_LRKND[0].shape[3], self._shared_LKCD[0].shape[2]
        if needed.rows <= rows and needed.own <= own and needed.columns <= columns:
            return
        wanted = Layout(
            rows=rows if needed.rows <= rows else max(8, 1 << (needed.rows - 1).bit_length()),
            own=own if needed.own <= own else needed.own + max(32, needed.own // 2),
            columns=columns if needed.columns <= columns else max(512, 2 * needed.columns),
        )
        self._resize(wanted if self._fits(wanted) else self._tight(needed, wanted))

    def _tight(self, needed: Layout, wanted: Layout) -> Layout:
        """A layout with the rows and columns that are needed, and own columns as the bound allows."""
        least = needed + Layout(rows=self.rows, own=max(self._lengths, default=0), columns=self.columns)
        spare = Layout(rows=least.rows, own=least.own + _LESS_GROWTH, columns=least.columns + 512)
        if self._fits(spare):
            least.columns = max(least.columns, min(wanted.columns, spare.columns))
        longest = max(least.own, min(wanted.own, self._rounded(max(self._limits, default=0))))
        if not self._fits(least):  # a row alone
            own = min(longest, least.own + max(_LESS_GROWTH, least.own // 8))
            return Layout(rows=least.rows, own=own, columns=least.columns)
        assert self.most_bytes is not None
        left = self.most_bytes - Layout(rows=least.rows, columns=least.columns).nbytes(self._token_bytes)
        fitting = left // (self._token_bytes * least.rows) if least.rows else longest
        return Layout(rows=least.rows, own=min(longest, fitting), columns=least.columns)

    def _resize(self, to: Layout) -> None:
        # Block by block, so that only one is held twice.
        for blocks, sizes in ((self._shared_LKCD, {2: to.columns}), (self._own_LRKND, {1: to.rows, 3: to.own})):
            for index in range(2):
                blocks[index] = resized(blocks[index], sizes)
        self._visible_RC = resized(self._visible_RC, {0: to.rows, 1: to.columns})
        self._position_C = resized(self._position_C, {0: to.columns})
        self._users = resized(self._users, {0: to.columns})
        self._lengths_R = resized(self._lengths_R, {0: to.rows})


def _count(nodes: Iterable[Node]) -> int:
    return sum(len(node.tokens) for node in nodes)
