"""Logprobs of tokens that vLLM sampled, from a plain transformers forward pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.torch.sampling import _nucleus
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.model.constraint import Constraints
from lightning_core.model.source import load_model, load_tokenizer


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


class Reference:
    def __init__(self, folder: Path) -> None:
        self._model = load_model(folder, torch.float32)
        tokenizer: Any = load_tokenizer(folder)
        self._constraints = Constraints(tokenizer, len(tokenizer))

    @torch.no_grad()
    def assert_logprobs(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        logprobs: Sequence[float],
        params: SamplingParams,
        *,
        start: int = 0,
    ) -> None:
        """``logprobs`` are those of ``response[start:]`` under the distribution of ``params``."""
        ids = torch.tensor([[*prompt, *response]], dtype=torch.int64)
        scores = self._model(ids).logits[0, len(prompt) - 1 + start : -1].float() / (params.temperature or 1.0)
        if params.constraint is not None:
            masks = self._constraints.allowed(params.constraint, response)
            scores = scores.masked_fill(torch.from_numpy(~np.stack(list(masks))[start:]), -torch.inf)
        if params.top_p < 1 and params.temperature > 0:
            scores = _nucleus(scores, torch.full((len(scores),), params.top_p))
        expected = scores.log_softmax(-1).gather(1, ids[0, len(prompt) + start :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0, check_dtype=False)
        if params.temperature == 0:
            assert list(response[start:]) == scores.argmax(-1).tolist()


async def collect(deltas: AsyncGenerator[Delta]) -> list[Delta]:
    collected = [delta async for delta in deltas]
    assert [d.finish_reason for d in collected[:-1]] == [None] * (len(collected) - 1)
    assert collected[-1].finish_reason is not None
    return collected


def sample(backend: VllmBackend, prompt: list[int], params: SamplingParams, *, stream: bool = False) -> Delta:
    """Merge a response's deltas into one."""
    return join(asyncio.run(collect(backend.generate(prompt, params, model="policy", stream=stream))))


def join(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[logprob for delta in deltas for logprob in delta.logprobs],
        version=deltas[-1].version,
        finish_reason=deltas[-1].finish_reason,
    )
