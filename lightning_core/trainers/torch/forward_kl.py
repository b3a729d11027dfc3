"""The forward KL divergence from another distribution, the teacher's, as a term of the loss.

    weight · sum_t weight_t sum_v teacher_t(v) (log teacher_t(v) − log policy_t(v))

at the sampled tokens t, over the teacher's K most likely tokens v and, as one more, all others together (GKD, arXiv
2306.13649, with the divergence D = KL(teacher, policy) and samples of the policy). It is 0 if and only if the policy gives these
tokens the teacher's probabilities. Where the policy gives the others less than a fourth of what the teacher does, their logarithm
is continued by its tangent. ``algorithm.aggregation`` gives the weights of the tokens.

Dimensions: E trained tokens of a micro-batch, of which D have teacher candidates, K candidates, X = D · K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_core.trace import Floats
from lightning_core.trainers.torch.packing import PackedBatch
from lightning_core.transitions import Candidates, Row

MIN_OTHERS = 1e-6
"""Below this the policy's probability of all other tokens together is rounding: it is 1 minus a sum in float32."""
MAX_RATIO = 4.0
"""Up to here the gradient grows with teacher / policy of the other tokens. It is the difference of two sums that are larger by this
ratio, so in bfloat16 more digits would be noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardKl:
    """The term of one micro-batch."""

    places_X: Tensor
    """int64: the trained token, counted along E, whose place also predicts each candidate."""
    targets_X: Tensor
    """int64: token ids."""
    probabilities_DK: Tensor
    """float32: the teacher's; 0 for padding."""
    weights_D: Tensor
    """float32: with `Candidates.weight`."""

    def __call__(self, logprobs_X: Tensor) -> tuple[Tensor, Tensor]:
        """The term, and the sum of the divergences in nats. ``logprobs_X``: the policy's, float32, with gradient."""
        teacher_DK, policy_DK = self.probabilities_DK, logprobs_X.view_as(self.probabilities_DK)
        others_D = (1 - teacher_DK.sum(dim=-1)).clamp_min(0)
        policy_others_D = 1 - (policy_DK.exp() * (teacher_DK > 0)).sum(dim=-1)
        entropy_D = torch.special.entr(teacher_DK).sum(dim=-1) + torch.special.entr(others_D)
        log_others_D = _log(policy_others_D, bound_D=(others_D / MAX_RATIO).clamp_min(MIN_OTHERS))
        divergences_D = -(teacher_DK * policy_DK).sum(dim=-1) - others_D * log_others_D - entropy_D
        return (self.weights_D * divergences_D).sum(), divergences_D.detach().sum()


def _log(values_D: Tensor, *, bound_D: Tensor) -> Tensor:
    """The logarithm, below ``bound_D`` continued by its tangent there."""
    return torch.maximum(values_D, bound_D).log() + ((values_D - bound_D) / bound_D).clamp_max(0)


def forward_kl(
    batch: PackedBatch, rows: Sequence[Row], weights: Sequence[Floats], device: torch.device
) -> ForwardKl | None:
    """The term of ``batch``; None if none of its tokens has candidates.

    ``rows``: all rows of the step. ``weights``: of each of their tokens, float32 [L].
    """
    places: list[NDArray[np.int64]] = []
    own: list[Floats] = []
    candidates: list[Candidates] = []
    first = 0
    for index, columns in zip(batch.rows, batch.columns, strict=True):
        for segment in rows[index].segments:
            proposed = rows[index].streams.candidates.get(segment.call)
            if proposed is not None:
                tokens = np.arange(segment.start, segment.stop)
                places.append(first + np.searchsorted(columns, tokens))
                own.append(weights[index][tokens] * proposed.weight)
                candidates.append(proposed)
        first += len(columns)
    if not candidates:
        return None
    ids_DK = np.concatenate([each.token_ids_TK for each in candidates]).astype(np.int64)
    logprobs_DK = np.concatenate([each.logprobs_TK for each in candidates])
    # Where fewer tokens were allowed, or a server knows more, the rest has the probability 0 and another token as its target.
    known_DK = np.isfinite(logprobs_DK)
    targets_DK = np.where(known_DK, ids_DK, np.where(known_DK, ids_DK, 0).max(axis=1, keepdims=True))

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return ForwardKl(
        places_X=tensor(np.repeat(np.concatenate(places), ids_DK.shape[1])),
        targets_X=tensor(targets_DK.reshape(-1)),
        probabilities_DK=tensor(np.exp(logprobs_DK)),
        weights_D=tensor(np.concatenate(own)),
    )
