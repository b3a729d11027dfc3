"""Proves that the loss uses exactly what was sampled, each token once.

It compares tokens, logprobs, temperatures and versions of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_core.backends.backend import sampling_digest
from lightning_core.errors import ProofError, TrainingError
from lightning_core.trace import Floats
from lightning_core.trainers.torch.packing import Ints, PackedBatch
from lightning_core.transitions import Row, Segment


def check_rows(rows: Sequence[Row], *, max_context: int) -> None:
    """Raise `TrainingError` for rows without advantages, with numbers that are not finite, or longer than the context."""
    for row in rows:
        if row.advantages is None:
            raise TrainingError(f"a row of rollout {row.rollout!r} has no advantages: assign credit first")
        for name, values in (("advantages", row.advantages), ("logprobs", row.logprobs)):
            if not np.isfinite(values).all():
                raise TrainingError(f"a row of rollout {row.rollout!r} has {name} that are not finite")
        if len(row.token_ids) > max_context:
            raise TrainingError(
                f"a row of rollout {row.rollout!r} has {len(row.token_ids)} tokens, more than max_context={max_context}"
            )


def prove_once(rows: Sequence[Row]) -> None:
    """Raise `ProofError` if a call would be trained twice, or a token that no call sampled."""
    counts = Counter(segment.call for row in rows for segment in row.segments)
    for call, count in counts.items():
        if count > 1:
            raise ProofError(f"call {call} would be trained {count} times in this step; expected once")
    for row in rows:
        covered = np.zeros(len(row.mask), dtype=np.bool_)
        for segment in row.segments:
            covered[segment.start : segment.stop] = True
        if not np.array_equal(covered, row.mask):
            raise ProofError(
                f"a row of rollout {row.rollout!r} marks {int(row.mask.sum())} tokens as sampled, but its {len(row.segments)} calls "
                f"sampled {int(covered.sum())} tokens at other positions"
            )


def prove_batch(rows: Sequence[Row], batch: PackedBatch, logprobs_R: Floats) -> None:
    """Raise `ProofError` unless ``batch`` contains each of its rows exactly as it was sampled.

    Everything except version and digest is read back from the arrays that the model and the loss get. ``logprobs_R``, float32
    [R]: the sampled logprobs that the loss uses.
    """
    logprobs_E = np.zeros(len(batch.sampled_E), dtype=np.float32)
    logprobs_E[batch.sampled_E] = logprobs_R
    stop = 0
    for index, columns, places in zip(batch.rows, batch.columns, batch.places, strict=True):
        start, stop = stop, stop + len(columns)
        _prove_row(rows[index], columns, places, batch, slice(start, stop), logprobs_E[start:stop])


def _prove_row(row: Row, columns: Ints, places: Ints, batch: PackedBatch, trained: slice, logprobs: Floats) -> None:
    targets = batch.targets_E[trained]
    token_ids = np.append(batch.token_ids_S[places], targets[-1])
    sources = batch.source_E[trained]
    if not (
        np.array_equal(batch.position_ids_S[places], np.arange(len(places)))
        and np.array_equal(batch.places_P[sources], places[columns - 1])
        and np.array_equal(token_ids[columns], targets)
    ):
        raise ProofError(
            f"a row of rollout {row.rollout!r} was packed wrongly: its tokens are predicted from other places"
        )
    for segment in row.segments:
        own = slice(*np.searchsorted(columns, (segment.start, segment.stop)))
        temperature = float(row.temperatures[segment.start])
        # Greedy samples have logprobs at temperature 1.
        if not (batch.temperatures_P[sources[own]] == np.float32(temperature or 1.0)).all():
            raise ProofError(f"call {segment.call} was sampled at temperature {temperature:g} but packed with another")
        prove_segment(
            row,
            segment,
            prompt_ids=token_ids[: segment.start],
            output_ids=targets[own],
            logprobs=logprobs[own],
            temperature=temperature,
        )


def prove_segment(
    row: Row, segment: Segment, *, prompt_ids: Any, output_ids: Any, logprobs: Any, temperature: float
) -> None:
    """Raise `ProofError` unless these tokens and logprobs have the segment's digest.

    ``prompt_ids`` [P]; ``output_ids`` and ``logprobs`` [T].
    """
    found = sampling_digest(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=logprobs,
        temperature=temperature,
        version=segment.version,
        constraint=segment.constraint,
    )
    if found != segment.digest:
        raise ProofError(
            f"call {segment.call} of agent {row.agent!r} (rollout {row.rollout}): its tokens, logprobs, temperature or version are not "
            f"those that were sampled: digest {found}, expected {segment.digest}. Nothing was trained. Either the record was "
            "changed after sampling, or there is a bug"
        )


def prove_sampler(difference: float, limit: float | None) -> None:
    """Raise `TrainingError` if sampler and trainer compute different policies.

    ``difference``: between their logprobs, as a mean over all tokens in nats.
    """
    if limit is not None and not difference <= limit:
        raise TrainingError(
            f"the logprobs of sampler and trainer differ by {difference:.3g} nats on average, more than "
            f"trainer.max_logprob_difference={limit:g}, so the sampler does not sample the policy that is trained; the "
            "weights are unchanged. Use policy.dtype: float32, or policy.backend: torch, to find the cause; raise the "
            "limit only for a sampler that is known to be less exact, with algorithm.importance"
        )
