"""Sizes of the blocks of keys and values that running rows hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

_MASK_BYTES = 4
"""Of a float that is added to the scores of a row at a shared column."""


@dataclass(slots=True, kw_only=True)
class Layout:
    """Sizes of the blocks: ``rows`` own blocks of ``own`` columns, and ``columns`` shared columns."""

    rows: int = 0
    own: int = 0
    columns: int = 0

    def __add__(self, other: Layout) -> Layout:
        """The sizes that both need."""
        return Layout(
            rows=max(self.rows, other.rows), own=max(self.own, other.own), columns=max(self.columns, other.columns)
        )

    def nbytes(self, token_bytes: int) -> int:
        """Bytes of the blocks, with keys and values of ``token_bytes`` in a column."""
        return token_bytes * (self.rows * self.own + self.columns) + _MASK_BYTES * self.rows * self.columns


def resized(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """A copy with other ``sizes`` of dimensions, cut or padded with 0: uninitialized memory may hold NaN, and 0 times NaN is NaN."""
    shape = [sizes.get(dim, size) for dim, size in enumerate(tensor.shape)]
    if shape == list(tensor.shape):
        return tensor
    new = tensor.new_zeros(shape)
    common = tuple(slice(min(size, old)) for size, old in zip(shape, tensor.shape, strict=True))
    new[common] = tensor[common]
    return new
