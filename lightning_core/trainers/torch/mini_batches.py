"""The mini-batches of a step: which rows, in which micro-batches, with which loss; and the metrics of their updates."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_core.trainers.torch.objective import Objective
from lightning_core.trainers.torch.packing import PackedBatch
from lightning_core.transitions import Row

CROSS_ENTROPY, FORWARD_KL = "ce_loss", "teacher_forward_kl"
"""The metrics of the terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The rows of one optimizer update, their micro-batches, and the loss over them."""

    rows: Sequence[Row]
    batches: Sequence[PackedBatch]
    objective: Objective

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(int(batch.sampled_E.sum()) for batch in self.batches)

    @property
    def tokens_of_terms(self) -> Mapping[str, int]:
        """Number of tokens of each further term of the loss."""
        return {
            CROSS_ENTROPY: sum(int(batch.cross_entropy_E.sum()) for batch in self.batches),
            FORWARD_KL: sum(len(term.weights_D) for term in self.objective.kl_terms if term is not None),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The report of one optimizer update."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    """Number of sampled tokens."""
    sums: Mapping[str, float]
    """Sums over the sampled tokens."""
    maxima: Mapping[str, float]
    terms: Mapping[str, tuple[float, int]] = field(default_factory=dict[str, tuple[float, int]])
    """Sum over tokens and number of tokens of each further loss term, by metric."""


def split_rollouts(rows: Sequence[Row], parts: int, *, seed: str) -> list[list[Row]]:
    """``rows`` in ``parts`` mini-batches of about as many rollouts; the rows of a rollout stay together.

    Which rollouts share a mini-batch depends on ``seed`` alone. With fewer rollouts than parts, there is one part for
    each. Rows without sampled tokens are left out if there is more than one part.
    """
    trained = [row for row in rows if row.mask.any()]
    if parts == 1 or not trained:
        return [list(rows)]
    rollouts = list(dict.fromkeys(row.rollout for row in trained))
    random.Random(seed).shuffle(rollouts)
    part_of = {rollout: number % parts for number, rollout in enumerate(rollouts)}
    found: list[list[Row]] = [[] for _ in range(min(parts, len(rollouts)))]
    for row in trained:
        found[part_of[row.rollout]].append(row)
    return found


def step_metrics(parts: Sequence[MiniBatch], updates: Sequence[Update]) -> dict[str, float]:
    """The metrics of a step that made ``updates`` in one or several passes over ``parts``.

    They describe the last pass: losses and gradient norms are means over its updates, all else over its tokens.
    Only the first update compares sampler and trainer on the same weights.
    """
    batches = [batch for part in parts for batch in part.batches]
    metrics: dict[str, float] = {
        "rows_trained": sum(len(batch.rows) for batch in batches),
        "packed_tokens": sum(len(batch.token_ids_S) for batch in batches),
        "micro_batches": len(batches),
        "updates": len(updates),
    }
    if updates:
        first = {name: value for name, value in _mean(updates[:1]).items() if name.startswith("logprob_difference")}
        metrics |= _mean(updates[-len(parts) :]) | first
    return metrics


def _mean(updates: Sequence[Update]) -> dict[str, float]:
    tokens = sum(update.tokens for update in updates)
    sums, term_sums, term_tokens = Counter[str](), Counter[str](), Counter[str]()
    maxima: dict[str, float] = {}
    for update in updates:
        sums.update(update.sums)
        term_sums.update({name: value for name, (value, _) in update.terms.items()})
        term_tokens.update({name: count for name, (_, count) in update.terms.items()})
        maxima |= {name: max(value, maxima.get(name, value)) for name, value in update.maxima.items()}
    return {
        "loss": sum(update.loss for update in updates) / len(updates),
        "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        "learning_rate": updates[-1].learning_rate,
        **{name: value / tokens for name, value in sums.items()},
        **{name: value / term_tokens[name] for name, value in term_sums.items()},
        **maxima,
    }
