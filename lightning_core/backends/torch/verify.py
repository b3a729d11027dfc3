"""Checks at the start that responses do not depend on the batch, to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.batch_invariant import varies
from lightning_core.backends.torch.rows import ActiveRow, Lane
from lightning_core.model.adapters import Adapters

_CONTEXTS = (5, 70, 270)
"""Tokens of the prompts: fewer and more than a block of keys, and than a chunk."""
_SAMPLED, _REFILLED = 3, 2


@torch.inference_mode()
def verify(lane: Lane, model: Any, adapters: Adapters | None) -> None:
    """Raise `TrainingError` if rows have other logprobs together than alone, or after their context is computed again.

    ``lane`` must not have sampled yet.
    """
    config = model.config.get_text_config()
    longest = min(_CONTEXTS[-1], getattr(config, "max_position_embeddings", None) or _CONTEXTS[-1]) - _SAMPLED
    tokens = np.arange(longest, dtype=np.int64) * 7 % config.vocab_size
    adapter = next(iter(adapters.names), None) if adapters is not None else None
    rows = [_row(tokens[:count], number, adapter) for number, count in enumerate(_CONTEXTS)]
    _sample(lane, rows)
    for number, row in enumerate(rows):
        alone = _row(row.prompt, number, adapter)
        _sample(lane, [alone])
        if (alone.tokens, alone.logprobs) != (row.tokens, row.logprobs):
            raise varies(f"the response to {len(row.prompt)} tokens depends on the batch")
        if lane.remembers:
            again = _row(row.prompt, number, adapter)
            again.tokens, again.logprobs = row.tokens[:_REFILLED], row.logprobs[:_REFILLED]
            for _ in range(_REFILLED):
                again.random.random()
            _sample(lane, [again])
            if (again.tokens, again.logprobs) != (row.tokens, row.logprobs):
                raise varies(f"sampled tokens after {len(row.prompt)} others differ from tokens of a prompt")
    lane.prompt_tokens = lane.prompt_tokens_computed = lane.sampled_tokens = lane.decode_steps = 0


def _row(prompt: np.ndarray[Any, np.dtype[np.int64]], number: int, adapter: str | None) -> ActiveRow:
    params = SamplingParams(max_tokens=_SAMPLED)
    return ActiveRow(prompt=prompt, params=params, adapter=adapter, random=random.Random(number))


def _sample(lane: Lane, rows: Sequence[ActiveRow]) -> None:
    lane.waiting.extend(rows)
    lane.admit(rows=len(rows), tokens=1 << 20)
    while len(rows[0].tokens) < _SAMPLED:
        lane.step()
    lane.clear()
