"""What each token weighs in the loss: settled for a whole step, before anything is cut into micro-batches.

So the gradient is the same however rows are packed, merged or accumulated: loss = sum_t weight_t loss_t.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from lightning_core.config_algorithm import Algorithm, SequenceKind
from lightning_core.errors import TrainingError
from lightning_core.trace import Floats
from lightning_core.transitions import Row


def sequence_of(rows: Sequence[Row], kind: SequenceKind) -> list[Hashable]:
    """For each row, the sequence that it is, or is a part of."""
    return [row.rollout if kind == "rollout" else index for index, row in enumerate(rows)]


def token_weights(rows: Sequence[Row], algorithm: Algorithm) -> list[Floats]:
    """The weight of each token of each row, float32 [L], 0 where the mask is False.

    ``rollout-mean``: the mean over rollouts of the mean over each rollout's tokens, in however many rows they stand (arXiv
    2608.17528, eq. 16; the divisor is the number of rollouts, not of rows). ``sequence-mean``: the same over sequences (GRPO, arXiv
    2402.03300). ``token-mean``: the mean over all tokens (DAPO, arXiv 2503.14476). ``constant``: the mean over rollouts of the sum over
    each rollout's tokens, divided by a constant (Dr. GRPO, arXiv 2503.20783); all others add up to 1. What has no sampled token does
    not count. Raises `TrainingError` if nothing has.
    """
    by_row = algorithm.aggregation == "sequence-mean" and algorithm.sequence == "row"
    units = sequence_of(rows, "row" if by_row else "rollout")
    tokens: Counter[Hashable] = Counter()
    for unit, row in zip(units, rows, strict=True):
        tokens[unit] += int(row.mask.sum())
    if not tokens.total():
        raise TrainingError(f"none of the {len(rows)} rows has a sampled token")
    trained = {unit: count for unit, count in tokens.items() if count}
    if algorithm.aggregation == "token-mean":
        weight = dict.fromkeys(trained, 1.0 / tokens.total())
    elif algorithm.constant_tokens is not None:
        weight = dict.fromkeys(trained, 1.0 / (len(trained) * algorithm.constant_tokens))
    else:
        weight = {unit: 1.0 / (len(trained) * count) for unit, count in trained.items()}
    return [(row.mask * weight.get(unit, 0.0)).astype(np.float32) for unit, row in zip(units, rows, strict=True)]
