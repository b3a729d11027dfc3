"""Prefill and decoding on the tree path, with a cache of contexts.

Rows of different adapters run in the same passes but share no keys and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_core.backends.torch.batch_invariant import FixedRows, InvariantTree, OwnContexts, measure
from lightning_core.backends.torch.decoding import Cascade
from lightning_core.backends.torch.kv_pool import KVPool, Node, TokenArray, cached
from lightning_core.backends.torch.layout import Layout
from lightning_core.backends.torch.rows import ActiveRow, LaneState, last_inputs, preempt_newest, sample_next
from lightning_core.backends.torch.waiting_order import WaitingOrder
from lightning_core.model.adapters import Adapters
from lightning_core.model.attention import NAME, AttentionState, Geometry, TreeAttention
from lightning_core.model.compute import decoder_name
from lightning_core.model.forest import Forest, plan_blocks, plan_runs
from lightning_core.model.memory import steady_bytes


class TreeLane(LaneState):
    """The `Lane` of a model on the tree path."""

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        *,
        adapters: Adapters | None = None,
        deterministic: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``adapters``: the adapters of ``model``, if it has any. ``deterministic``: see `batch_invariant`.

        ``dtype``: of keys and values; None for that of the weights.

        Nothing is cached for later prompts unless `remember` is called.
        """
        super().__init__()
        weight: Tensor = model.get_input_embeddings().weight
        self._model = model
        self._decoder = getattr(model, decoder_name(model))
        self._geometry = geometry
        self._adapters = adapters
        self._device = weight.device
        self._dtype = dtype or weight.dtype
        self._pool = KVPool(0)
        self._limits = measure(model, geometry) if deterministic else None
        options: dict[str, Any] = {"dtype": self._dtype, "device": weight.device}
        self._cascade = (
            Cascade(geometry, **options) if self._limits is None else OwnContexts(geometry, self._limits, **options)
        )
        self.rows: list[ActiveRow] = []
        self._row_bytes = 0
        self._admissions = 0
        self._order = WaitingOrder()
        self.remembers = True

    def remember(self, cached_tokens: int) -> None:
        self._pool.capacity += cached_tokens

    def bound(self, row_bytes: int) -> None:
        self._row_bytes += row_bytes
        self._cascade.most_bytes = steady_bytes(self._row_bytes)

    @property
    def held_bytes(self) -> int:
        return self._cascade.nbytes

    def admit(self, *, rows: int, tokens: int) -> None:
        """See `Lane.admit`. The uncached parts of the contexts are computed in one pass."""
        if not self.waiting or len(self.rows) >= rows:
            return
        self._order.arrange(self.waiting, len(self.rows), self._pool.known)
        if ends := self._choose(rows, tokens):
            self._start(ends)

    def _choose(self, rows: int, tokens: int) -> Sequence[Node]:
        """Add waiting rows to `rows`, as `admit` does; returns the last node of each one's context, to be computed by `_start`."""
        known = self._pool.tokens
        self._admissions += 1
        ends: list[Node] = []
        layout = self._cascade.layout()
        while self.waiting and len(self.rows) < rows and self._pool.tokens - known < tokens:
            row = self.waiting.popleft()
            if row.aborted:
                continue
            self.rows.append(row)  # at once, so a failure reaches it
            # All but the last token, which is the input of the row's first step.
            end = self._pool.extend(row.context()[:-1], row.adapter)
            larger = self._forecast(layout, end, row)
            if larger is None and not ends and self._cascade.compact(self._pool, all_unused=True):
                larger = self._forecast(self._cascade.layout(), end, row)
            if larger is None and len(self.rows) > 1:
                self._pool.discard(end)
                self.waiting.appendleft(self.rows.pop())
                break
            ends.append(end)
            if larger is None:  # longer than the bound, so it runs alone
                break
            layout = larger
        return ends

    def _start(self, ends: Sequence[Node]) -> None:
        """Compute the contexts of the newest rows, which end with ``ends``, and start these; rows beyond the memory wait again."""
        running = len(self.rows) - len(ends)
        paths = [end.path() for end in ends]  # only now, because later prompts can split the nodes of earlier ones
        new = list(dict.fromkeys(node for path in paths for node in path if node.keys is None))
        if new:
            self._prefill(new)
        users = Counter(node for path in paths for node in path)
        self._cascade.reserve(len(self.rows))
        added = 0
        for row, path in zip(self.rows[running:], paths, strict=True):
            if not self._cascade.add(path, [users[node] for node in path], _room(row)):
                break
            self.prompt_tokens += len(row.prompt) + len(row.tokens)
            added += 1
        self.waiting.extendleft(reversed(self.rows[running + added :]))
        del self.rows[running + added :]
        self._order.started(added)
        self._pool.evict()
        self.prompt_tokens_computed += sum(len(node.tokens) for node in new) + added

    def _forecast(self, layout: Layout, end: Node, row: ActiveRow) -> Layout | None:
        """``layout`` with ``row``, whose context ends with ``end``; None if the row does not fit."""
        path = end.path()
        new = [node for node in path if node.column is None and node.admission != self._admissions]
        larger = self._cascade.forecast(layout, path, sum(len(node.tokens) for node in new), _room(row))
        if larger is not None:
            for node in new:
                node.admission = self._admissions
        return larger

    def step(self) -> None:
        self._preempt()
        inputs, positions = last_inputs(self.rows)
        self._cascade.begin()
        adapters = [row.adapter for row in self.rows]
        outputs = self._run(self._model, inputs, positions, self._cascade, adapters, [1] * len(adapters))
        self._cascade.end()
        sample_next(self.rows, outputs.logits[0])
        self.sampled_tokens += len(self.rows)
        self.decode_steps += 1

    def _preempt(self) -> None:
        """Let the newest rows wait again until a step fits."""
        left = False
        while len(self.rows) > 1 and not self._cascade.fits_step(rows_left=left):
            if self._cascade.compact(self._pool, all_unused=True):
                continue
            preempt_newest(self, self._row_bytes)
            left = True

    def drop(self, leaves: Callable[[ActiveRow], bool], *, remember: bool = False) -> None:
        changed = False
        for index in reversed(range(len(self.rows))):
            row = self.rows[index]
            if not leaves(row):
                continue
            if remember:
                # The last token was sampled but never an input, so it has no keys and values.
                self._pool.insert(row.context()[:-1], *self._cascade.own(index), row.adapter)
            self._cascade.remove(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()
            changed = True
        if not changed:
            return
        if not self.rows and self._cascade.oversized:
            self._clear_cascade()
        self._cascade.compact(self._pool)
        self._pool.evict()

    def forget(self, adapter: str | None) -> None:
        """See `Lane.forget`. On a CPU the memory of the rows is kept for the next ones."""
        self._pool.forget(adapter)
        if any(row.adapter != adapter for row in self.rows):
            self.drop(lambda row: row.adapter == adapter)
            return
        self.rows = []
        if self._device.type == "cpu":  # growing again costs more than a second per step with the demo's model
            self._cascade.reset()
            self._forget_columns()
        else:
            self._clear_cascade()

    def clear(self) -> None:
        self.rows = []
        self._pool.clear()
        self._cascade.clear()

    def _clear_cascade(self) -> None:
        self._cascade.clear()
        self._forget_columns()

    def _forget_columns(self) -> None:
        for node in self._pool.nodes():
            node.column = None

    def _prefill(self, nodes: Sequence[Node]) -> None:
        """Compute the keys and values of ``nodes``; their parents must be computed or among them."""
        order: list[Node] = []
        parents: list[int] = []
        prefixes: dict[Node | None, int] = {}
        prefix_of_root: list[int] = []
        pending = set(nodes)
        roots = [node for node in nodes if node.parent not in pending]
        # The tokens of one adapter are adjacent, and within them those that continue the same context.
        for root in sorted(roots, key=lambda n: (n.adapter or "", prefixes.setdefault(n.parent, len(prefixes)))):
            prefix_of_root.append(prefixes[root.parent])
            # A function that calls itself would keep the nodes until the garbage collector runs.
            below = [(root, -1)]
            while below:
                node, parent = below.pop()
                index = len(order)
                order.append(node)
                parents.append(parent)
                below += [(child, index) for child in reversed(node.children.values()) if child in pending]
        before = [cached(parent.path()) if parent is not None else [] for parent in prefixes]
        starts = [sum(len(node.tokens) for node in node.path()[:-1]) for node in order]
        tokens = np.concatenate([node.tokens for node in order])
        positions = np.concatenate(
            [start + np.arange(len(node.tokens)) for start, node in zip(starts, order, strict=True)]
        )
        forest = Forest(lengths=[len(node.tokens) for node in order], parents=parents, prefixes=prefix_of_root)
        options: dict[str, Any] = {"groups": self._geometry.groups, "device": self._device, "prefixes": before}
        tree = (
            TreeAttention(plan_blocks(forest), **options)
            if self._limits is None
            else InvariantTree(plan_runs(forest), self._limits, **options)
        )
        recording = _Recording(tree, self._geometry, len(tokens), self._dtype, self._device)
        adapters = [node.adapter for node in order]
        self._run(self._decoder, tokens, positions, recording, adapters, [len(node.tokens) for node in order])
        start = 0
        for node in order:
            stop = start + len(node.tokens)
            # Copies, so an evicted node frees its memory while its neighbors stay.
            node.keys = recording.keys_LKSD[:, :, start:stop].clone()
            node.values = recording.values_LKSD[:, :, start:stop].clone()
            start = stop

    def _run(
        self,
        model: Any,
        tokens: Sequence[int] | TokenArray,
        positions: Sequence[int] | TokenArray,
        state: AttentionState,
        adapters: Sequence[str | None],
        lengths: Sequence[int],
    ) -> Any:
        """A pass of token runs with these ``adapters`` and ``lengths``."""
        exact = self._limits is not None
        mixed = nullcontext() if self._adapters is None else self._adapters.mix(adapters, lengths, uniform=exact)
        with mixed, nullcontext() if self._limits is None else FixedRows(self._limits.rows):
            return model(
                input_ids=self._tensor(tokens)[None],
                position_ids=self._tensor(positions)[None],
                use_cache=False,
                **{NAME: state},
            )

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self._device)


def _room(row: ActiveRow) -> int:
    """Tokens that the row may still sample."""
    return row.params.max_tokens - len(row.tokens)


class _Recording:
    """Tree attention that also stores the keys and values."""

    def __init__(
        self, tree: TreeAttention, geometry: Geometry, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (geometry.layers, geometry.kv_heads, tokens, geometry.width)
        self._tree = tree
        self.keys_LKSD = torch.empty(shape, dtype=dtype, device=device)
        self.values_LKSD = torch.empty(shape, dtype=dtype, device=device)

    def attend(
        self, layer: int, query_HSD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        self.keys_LKSD[layer] = key_KSD
        self.values_LKSD[layer] = value_KSD
        return self._tree.attend(layer, query_HSD, key_KSD, value_KSD, scaling, window)
