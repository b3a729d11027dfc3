"""The weight of each token in the loss, computed for a whole step at once.

Therefore packing, merging and accumulation do not change the gradient: loss = sum_t weight_t loss_t.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_core.config.algorithm import Algorithm, SequenceKind
from lightning_core.errors import TrainingError
from lightning_core.trace import Floats
from lightning_core.transitions import Row


def sequence_numbers(rows: Sequence[Row], kind: SequenceKind) -> list[NDArray[np.int64]]:
    """The sequence number of each token [L], by row."""
    if kind == "call":
        found: list[NDArray[np.int64]] = []
        first = 0
        for row in rows:
            starts = [segment.start for segment in row.segments]
            within = np.searchsorted(starts, np.arange(len(row.mask)), side="right") - 1
            found.append(first + np.maximum(within, 0))  # tokens before the first call are not sampled
            first += max(1, len(starts))
        return found
    rollouts = {rollout: number for number, rollout in enumerate(dict.fromkeys(row.rollout for row in rows))}
    numbers = [rollouts[row.rollout] if kind == "rollout" else index for index, row in enumerate(rows)]
    return [np.full(len(row.mask), number) for row, number in zip(rows, numbers, strict=True)]


def token_weights(rows: Sequence[Row], algorithm: Algorithm) -> list[Floats]:
    """The weight of each token of each row, float32 [L]; see `row_weights`.

    It is 0 where the mask is False.
    """
    if algorithm.aggregation == "sequence-mean" and algorithm.sequence == "call":
        numbers = sequence_numbers(rows, "call")
        counts = np.bincount(np.concatenate([own[row.mask] for own, row in zip(numbers, rows, strict=True)]))
        by_call = np.array(row_weights([""] * len(counts), counts.tolist(), algorithm))
        return [
            np.where(row.mask, by_call[np.minimum(own, len(counts) - 1)], 0.0).astype(np.float32)
            for own, row in zip(numbers, rows, strict=True)
        ]
    weights = row_weights([row.rollout for row in rows], [int(row.mask.sum()) for row in rows], algorithm)
    return [(row.mask * weight).astype(np.float32) for row, weight in zip(rows, weights, strict=True)]


def cross_entropy_weights(rows: Sequence[Row]) -> list[Floats]:
    """The weight of each token of each row in the cross-entropy term, float32 [L], with the token's coefficient.

    The term is the mean over rollouts of the mean over each rollout's chosen tokens. Rollouts without any do not count.
    """
    coefficients = [row.streams.cross_entropy for row in rows]
    counts = [0 if own is None else int((own != 0).sum()) for own in coefficients]
    weights = cross_entropy_row_weights([row.rollout for row in rows], counts)
    return [
        np.zeros(len(row.mask), dtype=np.float32) if own is None else (own * weight).astype(np.float32)
        for row, own, weight in zip(rows, coefficients, weights, strict=True)
    ]


def cross_entropy_row_weights(rollouts: Sequence[Hashable], tokens: Sequence[int]) -> list[float]:
    """The weight of each chosen token of each row. ``rollouts``: the rollout of each row. ``tokens``: its number of chosen tokens."""
    chosen: Counter[Hashable] = Counter()
    for rollout, count in zip(rollouts, tokens, strict=True):
        chosen[rollout] += count
    number = sum(count > 0 for count in chosen.values())
    return [1.0 / (number * chosen[rollout]) if chosen[rollout] else 0.0 for rollout in rollouts]


def row_weights(rollouts: Sequence[Hashable], tokens: Sequence[int], algorithm: Algorithm) -> list[float]:
    """The weight of each sampled token of each row.

    ``rollouts``: the rollout of each row. ``tokens``: the number of sampled tokens of each row. With ``sequence-mean`` and sequences
    by call, all of this is by call.

    - ``rollout-mean``: the mean over rollouts of the mean over each rollout's tokens, in all of its rows (arXiv 2608.17528,
      eq. 16; the divisor is the number of rollouts, not of rows).
    - ``sequence-mean``: the same over sequences (GRPO, arXiv 2402.03300).
    - ``token-mean``: the mean over all tokens (DAPO, arXiv 2503.14476).
    - ``constant``: the mean over rollouts of the sum over each rollout's tokens, divided by a constant (Dr. GRPO, arXiv
      2503.20783). For all others the weights sum to 1.

    Rollouts and sequences without sampled tokens do not count. Raises `TrainingError` if no row has sampled tokens.
    """
    alone = algorithm.aggregation == "sequence-mean" and algorithm.sequence != "rollout"
    units: Sequence[Hashable] = range(len(rollouts)) if alone else rollouts
    sampled: Counter[Hashable] = Counter()
    for unit, count in zip(units, tokens, strict=True):
        sampled[unit] += count
    if not sampled.total():
        raise TrainingError(f"none of the {len(rollouts)} rows has a sampled token")
    trained = {unit: count for unit, count in sampled.items() if count}
    if algorithm.aggregation == "token-mean":
        weight = dict.fromkeys(trained, 1.0 / sampled.total())
    elif algorithm.constant_tokens is not None:
        weight = dict.fromkeys(trained, 1.0 / (len(trained) * algorithm.constant_tokens))
    else:
        weight = {unit: 1.0 / (len(trained) * count) for unit, count in trained.items()}
    return [weight.get(unit, 0.0) for unit in units]
