"""Forests of token runs, and their partition into blocks of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 256
"""Siblings with at most this many tokens form one block: one dense product is cheaper than several small kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Runs of tokens in depth-first order.

    Run i has ``lengths[i]`` tokens and continues run ``parents[i]``.
    """

    lengths: Sequence[int]
    parents: Sequence[int]
    """Index of the run that this one continues, smaller than its own; -1 for a root."""
    prefixes: Sequence[int] = ()
    """The cached prefix that each root continues; roots of one prefix are adjacent. Empty: no prefixes."""


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
    linear: bool = False
    """Whether the block is known to be a part of one run, so each token attends to all of the block's before it."""


def plan_blocks(forest: Forest, *, limit: int = BLOCK_TOKENS) -> list[Block]:
    """Cut a forest into blocks, so each token is in exactly one."""
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
        linear = starts[first + 1] == stop
        blocks.append(Block(start=start, stop=stop, prefix=prefix, ancestors=ancestors, mask_SS=mask, linear=linear))

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


def plan_runs(forest: Forest, *, limit: int = BLOCK_TOKENS) -> list[Block]:
    """Cut a forest into blocks of one run each, so the keys of a block are its context in order."""
    lengths, parents = _split_long_runs(forest, limit)
    prefixes = iter(forest.prefixes or [0] * len(lengths))
    blocks: list[Block] = []
    start = 0
    for length, parent in zip(lengths, parents, strict=True):
        above = blocks[parent] if parent >= 0 else None
        blocks.append(
            Block(
                start=start,
                stop=start + length,
                prefix=next(prefixes) if above is None else above.prefix,
                ancestors=() if above is None else seen(above),
                mask_SS=np.tri(length, dtype=bool),
            )
        )
        start += length
    return blocks


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


def seen(block: Block) -> tuple[tuple[int, int], ...]:
    """The ranges of the packed sequence that a block attends to; its own is last."""
    return _append(block.ancestors, (block.start, block.stop))


def common_prefix(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]) -> int:
    """The number of first tokens that ``a`` and ``b`` share."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
