"""The forward pass of a packed micro-batch: hidden states, logprobs, entropies.

Dimensions: S packed tokens, P places whose logits are needed, E trained tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_core.model.attention import NAME, TreeAttention
from lightning_core.model.compute import ComputePlan, decoder_name
from lightning_core.model.constraint import Constraints
from lightning_core.model.forest import plan_blocks
from lightning_core.model.head import OutputHead
from lightning_core.trainers.torch.packing import PackedBatch
from lightning_core.trainers.torch.penalties import place_entropy
from lightning_core.transitions import Row


class Forward:
    """Forward passes through one model, with the adapter that is active when they run."""

    def __init__(self, model: Any, path: ComputePlan, constraints: Constraints) -> None:
        self._decoder = getattr(model, decoder_name(model))
        self._geometry = path.geometry
        self._constraints = constraints
        self._head = OutputHead(model, path.geometry)
        self._device: torch.device = model.get_input_embeddings().weight.device

    def hidden(self, batch: PackedBatch) -> Tensor:
        """The last hidden states [P, H] at the micro-batch's places; differentiable.

        They have the dtype of the weights.
        """
        if self._geometry is None:
            return self._padded_hidden(batch)
        tree = TreeAttention(plan_blocks(batch.forest), groups=self._geometry.groups, device=self._device)
        output = self._decoder(
            input_ids=self._tensor(batch.token_ids_S[None]),
            position_ids=self._tensor(batch.position_ids_S[None]),
            use_cache=False,
            **{NAME: tree},
        )
        return output.last_hidden_state[0].index_select(0, self._tensor(batch.places_P))

    def _padded_hidden(self, batch: PackedBatch) -> Tensor:
        """`hidden` on the plain path: each row is its own sequence, padded at its end.

        In a causal model no token depends on the padding after it, so no mask is needed.
        """
        width = max(len(places) for places in batch.places)
        tokens_BL = np.zeros((len(batch.places), width), dtype=np.int64)
        index_S = np.zeros(len(batch.token_ids_S), dtype=np.int64)  # of each packed token in the padded sequences
        for number, places in enumerate(batch.places):
            tokens_BL[number, : len(places)] = batch.token_ids_S[places]
            index_S[places] = number * width + np.arange(len(places))
        output = self._decoder(input_ids=self._tensor(tokens_BL), use_cache=False)
        return output.last_hidden_state.flatten(0, 1).index_select(0, self._tensor(index_S[batch.places_P]))

    def logprobs(
        self,
        batch: PackedBatch,
        rows: Sequence[Row],
        *,
        entropy: bool = False,
        others: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs [E] of the trained tokens and, with ``entropy``, their entropies [E].

        Entropies are of the distributions that the tokens were sampled from.
        ``rows``: all rows of the step. Both are float32 and differentiable.
        ``others``: X further tokens, as trained tokens (int64 [X], counted along E) and what could stand in their place
        (token ids, int64 [X]); the logprobs are [E + X] then.
        """
        hidden_PH = self.hidden(batch)
        temperatures_P, source_E = self._tensor(batch.temperatures_P), self._tensor(batch.source_E)
        source, targets = source_E, self._tensor(batch.targets_E)
        if others is not None:
            source, targets = torch.cat([source_E, source_E[others[0]]]), torch.cat([targets, others[1]])
        entropy_P = (
            place_entropy(self._head.logits(hidden_PH), temperatures_P, self._forbidden(batch, rows))
            if entropy
            else None
        )
        logprobs = self._head.logprobs(hidden_PH, temperatures_P, source, targets, self._forbidden(batch, rows))
        return logprobs, None if entropy_P is None else entropy_P[source_E]

    @torch.no_grad()
    def candidates(
        self, batch: PackedBatch, rows: Sequence[Row], count: int, *, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """The ``count`` most likely tokens in the place of each trained one: ids, int64 [E, K], and logprobs, float32 [E, K].

        ``rows``: all rows of the step. ``vocabulary``: see `OutputHead.top`.
        """
        ids_PK, logprobs_PK = self._head.top(
            self.hidden(batch),
            self._tensor(batch.temperatures_P),
            count,
            self._forbidden(batch, rows),
            vocabulary=vocabulary,
        )
        source_E = self._tensor(batch.source_E)
        return ids_PK[source_E], logprobs_PK[source_E]

    def _forbidden(self, batch: PackedBatch, rows: Sequence[Row]) -> Iterator[tuple[int, Tensor]]:
        """The places of constrained tokens, each with bool [V]: the excluded tokens."""
        allowed = (
            allowed_V
            for row in (rows[index] for index in batch.rows)
            for segment in row.segments
            if segment.constraint is not None
            for allowed_V in self._constraints.allowed(
                segment.constraint, row.token_ids[segment.start : segment.stop].tolist()
            )
        )
        places = np.argsort(batch.constrained_P)[np.count_nonzero(batch.constrained_P < 0) :]
        for place, allowed_V in zip(places.tolist(), allowed, strict=True):
            yield place, self._tensor(~allowed_V)

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class Reference:
    """Forward passes through the initial weights, without gradients."""

    def __init__(self, forward: Forward, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """``context``: entered for each pass, to switch off adapters on the same model."""
        self._forward = forward
        self._context = context

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, rows: Sequence[Row]) -> Tensor:
        """Logprobs [E] of the trained tokens; see `Forward.logprobs`."""
        with self._context():
            return self._forward.logprobs(batch, rows)[0]

    def candidates(
        self, batch: PackedBatch, rows: Sequence[Row], count: int, *, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """See `Forward.candidates`."""
        with self._context():
            return self._forward.candidates(batch, rows, count, vocabulary=vocabulary)
