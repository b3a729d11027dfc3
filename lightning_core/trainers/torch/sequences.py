"""Sums over sequences whose rows can be in several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_core.config.algorithm import SequenceKind
from lightning_core.trainers.torch.aggregation import sequence_numbers
from lightning_core.trainers.torch.packing import PackedBatch
from lightning_core.transitions import Row


class Sequences:
    """The N sequences of a step, and the sequence of each trained token of each micro-batch."""

    def __init__(
        self, rows: Sequence[Row], batches: Sequence[PackedBatch], kind: SequenceKind, device: torch.device
    ) -> None:
        of_rows = sequence_numbers(rows, kind)
        counted = [batch.gather(of_rows) for batch in batches]
        seen = [set(numbers_E.tolist()) for numbers_E in counted]
        total = 1 + max((number for numbers in seen for number in numbers), default=-1)
        self._numbers = [torch.from_numpy(numbers_E).to(device) for numbers_E in counted]
        self.tokens_N = sum(
            (torch.bincount(numbers_E, minlength=total) for numbers_E in self._numbers),
            torch.zeros(total, dtype=torch.int64, device=device),
        )
        """int64 [N]: the number of trained tokens of each sequence."""
        self.cut = sum(map(len, seen)) > len(set[int]().union(*seen))
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
