"""Caches of the plain path: of a single context, and of a batch of rows with contexts of different lengths.

Both are caches of transformers. In a batch, keys and values are padded on the left, and the states of convolutions and
recurrent layers are concatenated. Each pass over a batch has one token per row, so padding never enters a state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache as remembered
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_core.backends.torch.extent import Extent
from lightning_core.backends.torch.rows import ActiveRow

_STATES = ("conv_states", "recurrent_states")


def has_known_layers(cache: Any) -> bool:
    """Whether all layers of ``cache`` are of transformers' general types, whose tensors are known."""
    from transformers import cache_utils as kinds

    known = {
        kinds.DynamicLayer, kinds.DynamicSlidingWindowLayer, kinds.LinearAttentionLayer, kinds.DummyLayer,
        kinds.LinearAttentionAndFullAttentionLayer, kinds.LinearAttentionAndSlidingWindowAttentionLayer,
    }  # fmt: skip
    return all(type(layer) in known for layer in getattr(cache, "layers", [None]))


def with_layers(cache: Any, layers: list[Any]) -> Any:
    """A copy of ``cache`` with other layers."""
    found = copy.copy(cache)
    found.layers = layers
    return found


def cloned(cache: Any, tokens: int | None = None) -> Any:
    """A copy of ``cache`` for further passes, which change states in place. ``tokens``: keep only so many first ones."""
    layers = [_with_states(layer, lambda state: state.clone()) for layer in cache.layers]
    if tokens is not None:
        for layer in filter(_has_keys, layers):
            _set_keys(layer, [tensor[..., :tokens, :] for tensor in _keys(layer)], tokens)
    return with_layers(cache, layers)


def compacted(cache: Any, tokens: int) -> Any:
    """A copy of ``cache``, of ``tokens`` tokens, whose tensors keep no larger ones in memory."""
    found = cloned(cache)
    for layer in found.layers:
        if _has_keys(layer):
            _set_keys(layer, [_compact(tensor) for tensor in _keys(layer)], tokens)
    return found


def emptied(cache: Any) -> Any:
    """A copy of ``cache`` without tokens, whose states are zero: what comes before the first token."""
    layers = [_with_states(layer, torch.zeros_like) for layer in cache.layers]
    for layer in layers:
        if _has_keys(layer):
            _set_keys(layer, [tensor[..., :0, :] for tensor in _keys(layer)], 0)
    return with_layers(cache, layers)


def is_croppable(cache: Any) -> bool:
    """Whether ``cache`` has the keys of all tokens and no states, so it can be cut to any of its prefixes."""
    return not any(
        _states(layer) or (_has_keys(layer) and layer.keys.shape[-2] < layer.get_seq_length()) for layer in cache.layers
    )


def size_in_bytes(cache: Any) -> int:
    """Bytes of the tensors of ``cache``."""
    tensors = [tensor for layer in cache.layers for tensor in _states(layer)]
    tensors += [tensor for layer in cache.layers if _has_keys(layer) for tensor in (layer.keys, layer.values)]
    return sum(tensor.nbytes for tensor in tensors)


class RaggedKeys:
    """Keys and values of rows that end at the same column; mixed into a layer of a cache.

    Columns have numbers: a row with n tokens has the n columns before ``end``. They can be negative, as the first rows begin at 0
    and a longer row can join.
    """

    template: Any
    """A layer of the cache of a single context."""
    window: int | None
    rows: int
    start: int
    """The first column of the longest row."""
    end: int
    base: int
    """The column of the first place in ``blocks``."""
    blocks: list[Tensor]
    """Keys and values [rows, K, columns, D], with room for more rows and columns."""

    def begin(self, template: Any) -> None:
        """Make this an empty batch of layers like ``template``."""
        self.template = template
        self.window = getattr(template, "sliding_window", None)
        self.rows = self.start = self.end = self.base = 0
        self.blocks = [tensor.new_zeros(0, *tensor.shape[1:-2], 0, tensor.shape[-1]) for tensor in _keys(template)]
        _set_keys(template, self.blocks, 0)  # the template's tensors would stay in memory
        self.keys = self.values = None

    def get_seq_length(self) -> int:
        return self.end - self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first()
        return self.end - first + query_length, first - self.start

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the tokens of a pass; returns the keys and values that they can attend to."""
        first, stop = self._first(), self.end + key_states.shape[-2]
        self.reserve(self.rows, stop)
        for block, new in zip(self.blocks, (key_states, value_states), strict=True):
            block[: self.rows, :, self.end - self.base : stop - self.base] = new
        self.end = stop
        keys, values = (block[: self.rows, :, first - self.base : stop - self.base] for block in self.blocks)
        return keys, values

    def append(self, layers: Sequence[Any], start: int, *, tight: bool = False) -> None:
        """Append rows with the keys of ``layers``. ``start``: the first column of the longest row then."""
        rows, self.start = self.rows + len(layers), start
        self.reserve(rows, self.end, tight=tight)
        for row, layer in enumerate(layers, self.rows):
            for block, new in zip(self.blocks, _keys(layer), strict=True):
                block[row, :, self.end - self.base - new.shape[-2] : self.end - self.base] = new[0]
        self.rows = rows

    def remove(self, row: int) -> None:
        """Remove a row; the last row gets its number."""
        self.rows -= 1
        if row != self.rows:
            columns = slice(max(0, self._first() - self.base), self.end - self.base)
            for block in self.blocks:
                block[row, :, columns] = block[self.rows, :, columns]

    def single(self, row: int, tokens: int) -> Any:
        """The layer of one row, which has ``tokens`` tokens."""
        first = max(self.end - tokens, self._first())
        columns = slice(first - self.base, self.end - self.base)
        layer = copy.copy(self.template)
        _set_keys(layer, [block[row : row + 1, :, columns].clone() for block in self.blocks], tokens)
        return layer

    def forecast(self, rows: int, longest: int, new: int, *, tight: bool = False, compact: bool = False) -> int:
        """The most bytes of the blocks while ``rows`` rows, the longest of ``longest`` tokens, get ``new`` tokens each."""
        start, last = self.end - longest, self.end + max(new - 1, 0)
        extent = self._trimmed() if compact else self._extent()
        now = extent.grown(rows, self._first_of(start, self.end), self.end, tight=tight)
        # Blocks that grow lose the room of rows that have left, so they can be smaller than now.
        then = now.grown(rows, self._first_of(start, last), self.end + new, tight=tight)
        return max(now.cells, then.cells) * self._cell_bytes()

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return sum(block.nbytes for block in self.blocks)

    def reserve(self, rows: int, end: int, *, tight: bool = False) -> None:
        """Make room for ``rows`` rows and the columns up to ``end``; those that no row attends to any more are forgotten."""
        self._move(self._extent().grown(rows, self._first(), end, tight=tight))

    def compact(self) -> None:
        """Give up room that the rows do not need for their next tokens."""
        self._move(self._trimmed())

    def _extent(self) -> Extent:
        return Extent(self.blocks[0].shape[0], self.base, self.blocks[0].shape[2])

    def _trimmed(self) -> Extent:
        """The extent after `compact`."""
        return self._extent().trimmed(self.rows, self._first(), self.end)

    def _cell_bytes(self) -> int:
        """Bytes of the keys and values of one row and one column."""
        return sum(block.shape[1] * block.shape[3] * block.itemsize for block in self.blocks)

    def _move(self, extent: Extent) -> None:
        """Copy the rows to blocks of ``extent``, unless they have it."""
        if extent == self._extent():
            return
        first, old = extent.base, max(extent.base, self.base)
        blocks: list[Tensor] = []
        for block in self.blocks:
            new = block.new_zeros(extent.rows, block.shape[1], extent.columns, block.shape[3])
            kept = block[: self.rows, :, old - self.base : self.end - self.base]
            new[: self.rows, :, old - first : old - first + kept.shape[2]] = kept
            blocks.append(new)
        self.blocks, self.base = blocks, first

    def _first(self) -> int:
        """The first column that the next token can attend to."""
        return self._first_of(self.start, self.end)

    def _first_of(self, start: int, end: int) -> int:
        """The first column that the token of the column ``end`` can attend to, with ``start`` as the first one."""
        return start if self.window is None else max(start, end - self.window + 1)


class RaggedBatch:
    """Rows of one adapter that are decoded together, with contexts of any lengths; the caller samples their tokens."""

    def __init__(self, like: Any, adapter: str | None = None) -> None:
        """``like``: a cache of a single context, with known layers."""
        self.adapter = adapter
        self.rows: list[ActiveRow] = []
        self.lengths: list[int] = []
        """The number of cached tokens of each row."""
        self.cache = with_layers(like, [_ragged(layer) for layer in like.layers])
        self._keys: list[RaggedKeys] = [layer for layer in self.cache.layers if isinstance(layer, RaggedKeys)]

    def add(
        self, rows: Sequence[ActiveRow], caches: Sequence[Any], lengths: Sequence[int], *, tight: bool = False
    ) -> None:
        """Add ``rows``; ``caches`` and ``lengths``: the caches of all but the last tokens of their contexts.

        ``tight``: new blocks have as little room for further rows and tokens as possible.
        """
        longest = max(*self.lengths, *lengths, 0)
        for number, layer in enumerate(self.cache.layers):
            layers = [cache.layers[number] for cache in caches]
            if isinstance(layer, RaggedKeys):
                layer.append(layers, layer.end - longest, tight=tight)
            _append_states(layer, layers, len(self.rows))
        self.rows.extend(rows)
        self.lengths.extend(lengths)

    def remove(self, index: int) -> None:
        """Remove a row; the last row gets its index."""
        last = len(self.rows) - 1
        self.rows[index], self.lengths[index] = self.rows[-1], self.lengths[-1]
        self.rows.pop()
        self.lengths.pop()
        longest = max(self.lengths, default=0)
        for layer in self.cache.layers:
            if isinstance(layer, RaggedKeys):
                layer.remove(index)
                layer.start = layer.end - longest
            for states in _state_dicts(layer):
                for name, state in states.items():
                    if state is not None:
                        state[index] = state[last]
                        states[name] = state[:last]

    def forecast(self, lengths: Sequence[int], new: int, *, tight: bool = False, compact: bool = False) -> int:
        """The most bytes of the batch from when rows with ``lengths`` cached tokens are added until each row has got ``new`` tokens.

        ``tight``: new blocks have as little room as possible. ``compact``: `compact` comes first.
        """
        rows = len(self.lengths) + len(lengths)
        longest = max((*self.lengths, *lengths), default=0)
        states = 0
        for state in self._states():
            needed = rows * prod(state.shape[1:]) * state.itemsize
            # Rows that have left keep their part until others are added, which copies all.
            states += needed if lengths or compact else max(needed, state.untyped_storage().nbytes())
        return states + sum(layer.forecast(rows, longest, new, tight=tight, compact=compact) for layer in self._keys)

    def reserve(self, *, tight: bool) -> None:
        """Make room for one more token per row. ``tight``: see `add`."""
        for layer in self._keys:
            layer.reserve(layer.rows, layer.end + 1, tight=tight)

    @property
    def nbytes(self) -> int:
        """Bytes that the rows hold, with the room for further ones."""
        return sum(state.untyped_storage().nbytes() for state in self._states()) + sum(
            layer.nbytes for layer in self._keys
        )

    def _states(self) -> list[Tensor]:
        return [state for layer in self.cache.layers for state in _states(layer)]

    def compact(self) -> None:
        """Give up room that the rows do not need for their next tokens."""
        for layer in self.cache.layers:
            if isinstance(layer, RaggedKeys):
                layer.compact()
            for states in _state_dicts(layer):
                states.update({name: None if state is None else _compact(state) for name, state in states.items()})

    def context(self, index: int) -> tuple[Any, int]:
        """The cache of one row, and the number of its tokens."""
        length = self.lengths[index]
        layers = [
            _with_states(
                layer.single(index, length) if isinstance(layer, RaggedKeys) else layer,
                lambda state: state[index : index + 1].clone(),
                source=layer,
            )
            for layer in self.cache.layers
        ]
        return with_layers(self.cache, layers), length

    def arguments(self, device: torch.device) -> Mapping[str, Tensor]:
        """The arguments of the next pass besides the tokens: none if all rows have the same length."""
        if not self._keys or len(set(self.lengths)) == 1:
            return {}
        lengths_R = torch.tensor(self.lengths, device=device)
        longest = max(self.lengths)
        columns_N = torch.arange(longest + 1, device=device)
        return {
            "attention_mask": (columns_N[None] >= longest - lengths_R[:, None]).long(),
            "position_ids": lengths_R[:, None],
        }

    def advance(self) -> None:
        """Count the token that a pass added to each row."""
        self.lengths = [length + 1 for length in self.lengths]


def _ragged(layer: Any) -> Any:
    """An empty batch of layers like ``layer``; its states are those of ``layer`` until rows are added."""
    if not _has_keys(layer):
        return _with_states(layer, lambda state: state[:0])
    kind = _ragged_kind(type(layer))
    batch = kind.__new__(kind)
    vars(batch).update(vars(layer))
    batch.begin(_with_states(layer, lambda state: state[:0]))
    return _with_states(batch, lambda state: state[:0])


@remembered
def _ragged_kind(kind: type[Any]) -> Any:
    return type(f"Ragged{kind.__name__}", (RaggedKeys, kind), {})


def _append_states(layer: Any, parts: Sequence[Any], rows: int) -> None:
    for number, states in enumerate(_state_dicts(layer)):
        for name, state in states.items():
            if state is not None:
                others: list[Any] = [_state_dicts(part)[number][name] for part in parts]
                states[name] = torch.cat([state[:rows], *others])


def _with_states(layer: Any, change: Callable[[Tensor], Tensor], *, source: Any = None) -> Any:
    """A copy of ``layer`` with changed states, those of ``source`` if it is given."""
    found = copy.copy(layer)
    for name in _STATES:
        states: dict[int, Tensor | None] | None = getattr(layer if source is None else source, name, None)
        if states is not None:
            setattr(found, name, {key: None if state is None else change(state) for key, state in states.items()})
    return found


def _state_dicts(layer: Any) -> list[dict[int, Tensor | None]]:
    return [getattr(layer, name) for name in _STATES if hasattr(layer, name)]


def _states(layer: Any) -> list[Tensor]:
    return [state for states in _state_dicts(layer) for state in states.values() if state is not None]


def _has_keys(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), Tensor)


def _keys(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


def _compact(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _set_keys(layer: Any, keys_and_values: Sequence[Tensor], tokens: int) -> None:
    layer.keys, layer.values = keys_and_values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = tokens
