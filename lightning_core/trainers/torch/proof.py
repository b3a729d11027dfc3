"""The proof that what the loss is about to use is what was sampled: the same tokens, logprobs, temperature and weights, each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_core.digest import sampling_digest
from lightning_core.errors import ProofError
from lightning_core.trace import Floats
from lightning_core.trainers.torch.packing import Ints, PackedBatch
from lightning_core.transitions import Row, Segment


def prove_once(rows: Sequence[Row]) -> None:
    """Raise `ProofError` if a call is trained in two places, or a token that no call sampled."""
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
                f"a row of rollout {row.rollout!r} marks {int(row.mask.sum())} tokens as sampled, but the {len(row.segments)} calls in "
                f"it sampled {int(covered.sum())} at other places"
            )


def prove_batch(rows: Sequence[Row], batch: PackedBatch, logprobs_E: Floats) -> None:
    """Raise `ProofError` unless each row in ``batch`` stands there as it was sampled.

    Everything but version and digest is read back from the arrays that the model and the loss are given; ``logprobs_E``, float32 [E],
    are the sampled ones that the loss compares with.
    """
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
        # What was sampled greedily has its logprobs at temperature 1.
        if not (batch.temperatures_P[sources[own]] == np.float32(temperature or 1.0)).all():
            raise ProofError(f"call {segment.call} was sampled at temperature {temperature:g}, and packed with another")
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
    """Raise `ProofError` unless these tokens [P], [T] and logprobs [T] are those that ``segment`` was recorded with."""
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
            f"those that were sampled: digest {found}, expected {segment.digest}. Nothing was trained; the record was changed on "
            "its way, or there is a bug"
        )
