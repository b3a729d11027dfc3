"""Rows for trainer tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_core.transitions import Row


def make_row(
    *parts: tuple[Sequence[int], bool],
    rollout: str = "r0",
    advantage: float | Sequence[float] = 1.0,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
) -> Row:
    """A row from runs of tokens, each sampled or not; ``logprobs`` and ``advantage`` are those of the sampled tokens."""
    token_ids = np.array([token for tokens, _ in parts for token in tokens], dtype=np.uint32)
    mask = np.array([sampled for tokens, sampled in parts for _ in tokens], dtype=np.bool_)
    advantages = np.zeros(len(mask), dtype=np.float32)
    advantages[mask] = advantage
    sampled_logprobs = np.zeros(len(mask), dtype=np.float32)
    sampled_logprobs[mask] = -1.0 if logprobs is None else logprobs
    return Row(
        rollout=rollout,
        agent="writer",
        policy="policy",
        token_ids=token_ids,
        mask=mask,
        logprobs=sampled_logprobs,
        temperatures=np.where(mask, np.float32(temperature), np.float32(1)),
        advantages=advantages,
        segments=(),
    )
