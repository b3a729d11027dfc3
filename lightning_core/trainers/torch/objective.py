"""The loss of a step over all of its updates and micro-batches.

Each trained token has up to three logprobs:

- *sampled*: recorded by the sampler.
- *proximal*: the trainer's at the start of the step.
- *policy*: the trainer's now, with gradient. In the first update these equal the proximal ones.

Without importance correction the ratio in the loss is policy / sampled. With importance correction the ratio is policy /
proximal, and the importance weight is proximal / sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_core.config.algorithm import Algorithm, Importance
from lightning_core.config.build_rules import loss_rule
from lightning_core.trace import Floats
from lightning_core.trainers.torch.aggregation import cross_entropy_weights, token_weights
from lightning_core.trainers.torch.corrections import importance_weights
from lightning_core.trainers.torch.forward_kl import forward_kl
from lightning_core.trainers.torch.loss import TokenLoss, TrainedTokens, policy_loss
from lightning_core.trainers.torch.packing import PackedBatch
from lightning_core.trainers.torch.sequences import Sequences
from lightning_core.transitions import Row


def rows_to_train(rows: Sequence[Row], algorithm: Algorithm) -> list[int]:
    """Indices of the rows that contribute to the gradient or to a sequence's ratio."""
    sampled = [index for index, row in enumerate(rows) if row.mask.any()]
    if algorithm.kl is not None or algorithm.entropy_weight:
        return sampled
    credited = [index for index in sampled if rows[index].has_gradient]
    if "rollout" not in (algorithm.sequence, algorithm.importance and algorithm.importance.level):
        return credited
    rollouts = {rows[index].rollout for index in credited}
    return [index for index in sampled if rows[index].rollout in rollouts]


class Objective:
    """The loss of one step on ``batches``, the micro-batches of ``rows``."""

    def __init__(
        self, algorithm: Algorithm, rows: Sequence[Row], batches: Sequence[PackedBatch], device: torch.device
    ) -> None:
        self.algorithm = algorithm
        self._loss = loss_rule(algorithm)
        advantages = [row.advantages for row in rows if row.advantages is not None]
        weights = token_weights(rows, algorithm)
        self._policy: list[Tensor | None] = [_places(batch.sampled_E, device) for batch in batches]
        self._cross_entropy = _cross_entropy_terms(rows, batches, device)
        self.kl_terms = [forward_kl(batch, rows, weights, device) for batch in batches]
        """The forward KL divergence of each micro-batch; None without candidates."""
        self.sampled: list[Floats] = [batch.gather([row.logprobs for row in rows]) for batch in batches]
        """Sampled logprobs, float32 [R] per micro-batch: the arrays that the loss uses."""

        def columns(values: Sequence[Floats]) -> list[Tensor]:
            return [torch.from_numpy(batch.gather(values)).to(device) for batch in batches]

        self._sampled = {number: torch.from_numpy(values_E).to(device) for number, values_E in enumerate(self.sampled)}
        self._advantages, self._weights = columns(advantages), columns(weights)
        self._proximal: dict[int, Tensor] = {}
        self._importance: dict[int, tuple[Tensor, Tensor]] = {}
        self._ratio_sums_N: Tensor | None = None
        self._precomputed: Mapping[int, Tensor] = {}
        self._importance_sums_N: Tensor | None = None
        self.references: dict[int, Tensor] = {}
        """Logprobs of the reference model, float32 [E] by micro-batch; set by the trainer if the loss has a KL term."""
        self._ratio_sequences = (
            Sequences(rows, batches, algorithm.sequence, device)
            if self._loss.ratio == "sequence" and algorithm.sequence is not None
            else None
        )
        self._importance_sequences = (
            None
            if algorithm.importance is None or algorithm.importance.level == "token"
            else Sequences(rows, batches, algorithm.importance.level, device)
        )

    def needs_all_logprobs(self) -> bool:
        """Whether the next update needs all logprobs before its first gradient.

        It does if it uses the ratio of a sequence whose tokens are in several micro-batches, or a loss over all micro-batches.
        """
        ratio, importance = self._ratio_sequences, self._importance_sequences
        return (
            (ratio is not None and ratio.cut)
            or (importance is not None and importance.cut and not self._proximal)
            or (self._loss.whole_batch and len(self._advantages) > 1)
        )

    def precompute_logprobs(self, logprobs: Sequence[Tensor]) -> None:
        """Set the logprobs [E] of each micro-batch under the weights of the next update."""
        known = self._precomputed = {n: self.sampled_only(n, logprobs_E) for n, logprobs_E in enumerate(logprobs)}
        if self.algorithm.importance is not None and not self._proximal:
            self._proximal = known
            if self._importance_sequences is not None:
                self._importance_sums_N = self._importance_sequences.sums(self._log_ratios(known, self._sampled))
        if self._ratio_sequences is not None:
            self._ratio_sums_N = self._ratio_sequences.sums(self._log_ratios(known, self._old()))

    def sampled_only(self, batch: int, values_E: Tensor) -> Tensor:
        """The values [R] of the sampled tokens of a micro-batch, from the values of all trained tokens."""
        places_R = self._policy[batch]
        return values_E if places_R is None else values_E[places_R]

    def cross_entropy(self, batch: int, logprobs_E: Tensor) -> tuple[Tensor, Tensor]:
        """The cross-entropy term of a micro-batch, and the sum of −log policy over its tokens."""
        if not self._cross_entropy:
            return logprobs_E.new_zeros(()), logprobs_E.new_zeros(())
        places_C, weights_C = self._cross_entropy[batch]
        surprisals_C = -logprobs_E[places_C]
        return (weights_C * surprisals_C).sum(), surprisals_C.detach().sum()

    def loss(self, batch: int, logprobs_E: Tensor, entropy_E: Tensor | None = None) -> TokenLoss:
        """The loss of the sampled tokens of a micro-batch, which are all of its tokens E from here on.

        ``logprobs_E`` and ``entropy_E`` are float32 [E] with gradient, of all trained tokens.
        """
        importance_E, outside_E = None, None
        logprobs_E = self.sampled_only(batch, logprobs_E)
        entropy_E = None if entropy_E is None else self.sampled_only(batch, entropy_E)
        now_E = logprobs_E.detach()
        if self.algorithm.importance is not None:
            self._proximal.setdefault(batch, now_E)
            if batch not in self._importance:
                self._importance[batch] = self._importance_weights(batch, self.algorithm.importance)
            importance_E, outside_E = self._importance[batch]
        return policy_loss(
            TrainedTokens(
                logprobs_E=logprobs_E,
                sampled_E=self._sampled[batch],
                old_E=self._old()[batch],
                advantages_E=self._advantages[batch],
                weights_E=self._weights[batch],
                sequence_log_ratio_E=self._sequence_log_ratio(batch, now_E),
                importance_E=importance_E,
                outside_E=outside_E,
                reference_E=self.references.get(batch),
                entropy_E=entropy_E,
                others=self._others(batch) if self._loss.whole_batch else None,
            ),
            self.algorithm,
            self._loss,
        )

    def _others(self, batch: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Logprobs, log ratios and advantages of the tokens of all other micro-batches; None if there are none."""
        numbers = [number for number in range(len(self._advantages)) if number != batch]
        if not numbers:
            return None
        assert self._precomputed, (
            "precompute_logprobs() was not called, but the loss needs the tokens of all micro-batches"
        )
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        for number in numbers:
            now_E, old_E = self._precomputed[number], self._old()[number]
            ratio_E = self._sequence_log_ratio(number, now_E)
            columns.append((now_E, now_E - old_E if ratio_E is None else ratio_E, self._advantages[number]))
        logprobs, log_ratios, advantages = (torch.cat(column) for column in zip(*columns, strict=True))
        return logprobs, log_ratios, advantages

    def _old(self) -> Mapping[int, Tensor]:
        """The denominator of the ratio, by micro-batch."""
        return self._sampled if self.algorithm.importance is None else self._proximal

    @staticmethod
    def _log_ratios(new: Mapping[int, Tensor], old: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {batch: new_E - old[batch] for batch, new_E in new.items()}

    def _importance_weights(self, batch: int, importance: Importance) -> tuple[Tensor, Tensor]:
        sequences = self._importance_sequences
        log_ratio = self._log_ratios({batch: self._proximal[batch]}, self._sampled)
        if sequences is None:
            return importance_weights(log_ratio[batch], importance)
        sums_N = self._importance_sums_N if sequences.cut else sequences.sums(log_ratio)
        assert sums_N is not None, "precompute_logprobs() was not called, but a sequence is in several micro-batches"
        return importance_weights(sequences.spread(sums_N, batch), importance)

    def _sequence_log_ratio(self, batch: int, now_E: Tensor) -> Tensor | None:
        sequences = self._ratio_sequences
        if sequences is None:
            return None
        sums_N = self._ratio_sums_N if sequences.cut else sequences.sums(self._log_ratios({batch: now_E}, self._old()))
        assert sums_N is not None, "precompute_logprobs() was not called, but a sequence is in several micro-batches"
        return sequences.spread(sums_N / sequences.tokens_N, batch).float()


def _places(chosen_E: NDArray[np.bool_], device: torch.device) -> Tensor | None:
    """int64: where ``chosen_E`` is true; None if it is everywhere."""
    return None if chosen_E.all() else torch.from_numpy(np.flatnonzero(chosen_E)).to(device)


def _cross_entropy_terms(
    rows: Sequence[Row], batches: Sequence[PackedBatch], device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Per micro-batch, the C tokens with a cross-entropy loss: int64 [C], counted along E, and weights, float32 [C].

    Empty if no row has such tokens.
    """
    if all(row.streams.cross_entropy is None for row in rows):
        return []
    weights = cross_entropy_weights(rows)
    found: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        places_C = np.flatnonzero(batch.cross_entropy_E)
        weights_E = np.concatenate(
            [weights[row][columns] for row, columns in zip(batch.rows, batch.columns, strict=True)]
        )
        found.append((torch.from_numpy(places_C).to(device), torch.from_numpy(weights_E[places_C]).to(device)))
    return found
