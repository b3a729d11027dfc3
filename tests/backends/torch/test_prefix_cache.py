"""Contexts that are kept for later prompts are found by their longest usable prefix."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_core.backends.torch.prefix_cache import PrefixCache


def _cache(*, with_state: bool) -> Any:
    """Without layers it can be cut; a state cannot."""
    return SimpleNamespace(layers=[SimpleNamespace(conv_states={0: torch.zeros(1)})] if with_state else [])


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("with_state", [True, False])
def test_the_longest_usable_prefix_is_found_among_many(with_state: bool) -> None:
    drawn = random.Random(0)
    kept = PrefixCache()
    added: list[tuple[str | None, list[int]]] = []
    for _ in range(300):
        adapter, tokens = drawn.choice([None, "a"]), drawn.choices([1, 256], k=drawn.randint(1, 8))
        of_adapter = [other for name, other in added if name == adapter]
        shared = [_shared(other, tokens) for other in of_adapter]
        usable = [
            number for number, other in zip(shared, of_adapter, strict=True) if not with_state or number == len(other)
        ]
        array = np.asarray(tokens, dtype=np.int64)
        assert kept.find(array, adapter)[0] == max(usable, default=0)
        assert kept.shared(array, adapter) == max(shared, default=0)
        assert (kept.find(array, adapter, whole=True)[1] is not None) == (len(tokens) in usable)
        kept.add(array, adapter, _cache(with_state=with_state))
        added.append((adapter, tokens))


def test_contexts_beyond_the_capacity_are_dropped_in_the_order_of_their_use() -> None:
    kept = PrefixCache()
    kept.capacity = 8  # two states of a float each
    first, second, third = (np.asarray([number], dtype=np.int64) for number in (1, 2, 3))
    kept.add(first, None, _cache(with_state=True))
    kept.add(second, None, _cache(with_state=True))
    _, context = kept.find(first, None)
    assert context is not None
    kept.use(context, 1)
    kept.add(third, None, _cache(with_state=True))
    kept.evict()
    assert [kept.find(tokens, None)[0] for tokens in (first, second, third)] == [1, 0, 1]
