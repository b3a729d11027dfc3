"""Checks at the start that responses do not depend on the batch, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from lightning_core.backends.backend import SamplingParams
from lightning_core.backends.torch.batch_invariant import varies
from lightning_core.backends.torch.rows import ActiveRow, Lane
from lightning_core.model.adapters import Adapters

_CONTEXTS = (5, 70, 270)
"""Tokens of prompts: fewer and more than a block of keys, and than a chunk."""
_SHORT = range(1, 27, 2)
"""Tokens of further prompts. Only with many tokens in a pass, of which none are equal, do experts get different numbers of them."""
_GROUPS = (1, 2, 5, 8)
"""Rows that are sampled together, to compare them with all rows together."""
_SAMPLED, _REFILLED = 3, 2


@torch.inference_mode()
def verify(lane: Lane, model: Any, adapters: Adapters | None) -> None:
    """Raise `TrainingError` if rows have other logprobs in a larger batch, or after their context is computed again.

    ``lane`` must not have sampled yet.
    """
    config = model.config.get_text_config()
    longest = (getattr(config, "max_position_embeddings", None) or _CONTEXTS[-1]) - _SAMPLED
    drawn = np.random.default_rng(0)
    adapter = next(iter(adapters.names), None) if adapters is not None else None
    prompts = [drawn.integers(config.vocab_size, size=min(count, longest)) for count in (*_CONTEXTS, *_SHORT)]

    def fresh(numbers: Iterable[int]) -> list[ActiveRow]:
        return [_row(prompts[number], number, adapter) for number in numbers]

    together = fresh(range(len(prompts)))
    _sample(lane, together)
    order = iter(range(len(prompts)))
    for group in _GROUPS:
        numbers = list(islice(order, group))
        rows = fresh(numbers)
        _sample(lane, rows)
        for number, row in zip(numbers, rows, strict=True):
            if _result(row) != _result(together[number]):
                raise varies(f"the response to {len(row.prompt)} tokens depends on the batch")
    for row, again in zip(together, fresh(range(len(_CONTEXTS))), strict=False):
        if lane.remembers:
            again.tokens, again.logprobs = row.tokens[:_REFILLED], row.logprobs[:_REFILLED]
            for _ in range(_REFILLED):
                again.random.random()
            _sample(lane, [again])
            if _result(again) != _result(row):
                raise varies(f"sampled tokens after {len(row.prompt)} others differ from tokens of a prompt")
    lane.prompt_tokens = lane.prompt_tokens_computed = lane.sampled_tokens = lane.decode_steps = 0


def _result(row: ActiveRow) -> tuple[list[int], list[float]]:
    return row.tokens, row.logprobs


def _row(prompt: np.ndarray[Any, np.dtype[np.int64]], number: int, adapter: str | None) -> ActiveRow:
    params = SamplingParams(max_tokens=_SAMPLED)
    return ActiveRow(prompt=prompt, params=params, adapter=adapter, random=random.Random(number))


def _sample(lane: Lane, rows: Sequence[ActiveRow]) -> None:
    lane.waiting.extend(rows)
    lane.admit(rows=len(rows), tokens=1 << 20)
    while len(rows[0].tokens) < _SAMPLED:
        lane.step()
    lane.clear()
