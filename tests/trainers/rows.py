"""Rows for trainer tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from lightning_core.backends.backend import sampling_digest
from lightning_core.transitions import Row, Segment

_numbers = count()


def make_row(
    *parts: tuple[Sequence[int], bool],
    rollout: str = "r0",
    policy: str = "policy",
    advantage: float | Sequence[float] = 1.0,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
    constraint: str | None = None,
) -> Row:
    """A row from runs of tokens, each sampled in its own call or not; ``logprobs`` and ``advantage`` are for the sampled tokens."""
    token_ids = np.array([token for tokens, _ in parts for token in tokens], dtype=np.uint32)
    mask = np.array([sampled for tokens, sampled in parts for _ in tokens], dtype=np.bool_)
    advantages = np.zeros(len(mask), dtype=np.float32)
    advantages[mask] = advantage
    sampled_logprobs = np.zeros(len(mask), dtype=np.float32)
    sampled_logprobs[mask] = -1.0 if logprobs is None else logprobs
    segments: list[Segment] = []
    stop = 0
    for tokens, sampled in parts:
        start, stop = stop, stop + len(tokens)
        if sampled:
            digest = sampling_digest(
                prompt_ids=token_ids[:start],
                output_ids=token_ids[start:stop],
                logprobs=sampled_logprobs[start:stop],
                temperature=temperature,
                version=0,
                constraint=constraint,
            )
            segments.append(
                Segment(
                    call=f"c{next(_numbers)}", start=start, stop=stop, version=0, constraint=constraint, digest=digest
                )
            )
    return Row(
        rollout=rollout,
        agent="writer",
        policy=policy,
        token_ids=token_ids,
        mask=mask,
        logprobs=sampled_logprobs,
        temperatures=np.where(mask, np.float32(temperature), np.float32(1)),
        advantages=advantages,
        segments=tuple(segments),
    )
