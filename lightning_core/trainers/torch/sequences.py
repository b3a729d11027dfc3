"""Sums over sequences whose rows can be in several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_core.config.algorithm import SequenceKind
from lightning_core.trainers.torch.aggregation import sequence_of
from lightning_core.trainers.torch.packing import PackedBatch
from lightning_core.transitions import Row


class Sequences:
    """The N sequences of a step, and the sequence of each trained token of each micro-batch."""

    def __init__(
        self, rows: Sequence[Row], batches: Sequence[PackedBatch], kind: SequenceKind, device: torch.device
    ) -> None:
        keys = sequence_of(rows, kind)
        within = [[keys[index] for index in batch.rows] for batch in batches]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(key for found in within for key in found))}
        counted = [
            np.repeat([numbers[key] for key in found], [len(where) for where in batch.columns])
            for found, batch in zip(within, batches, strict=True)
        ]
        self._numbers = [torch.from_numpy(numbers_E).to(device) for numbers_E in counted]
        self.tokens_N = sum(
            (torch.bincount(numbers_E, minlength=len(numbers)) for numbers_E in self._numbers),
            torch.zeros(len(numbers), dtype=torch.int64, device=device),
        )
        """int64 [N]: the number of trained tokens of each sequence."""
        self.cut = sum(len(set(found)) for found in within) > len(numbers)
        """Whether a sequence has tokens in more than one micro-batch."""

    def sums(self, values: Mapping[int, Tensor]) -> Tensor:
        """float64 [N]: the sums of ``values``, which has [E] for some or all micro-batches."""
        sums_N = torch.zeros(len(self.tokens_N), dtype=torch.float64, device=self.tokens_N.device)
        for batch, values_E in values.items():
            sums_N.index_add_(0, self._numbers[batch], values_E.double())
        return sums_N

    def spread(self, values_N: Tensor, batch: int) -> Tensor:
        """[E]: for each trained token of a micro-batch, the value of its sequence."""
        return values_N[self._numbers[batch]]
