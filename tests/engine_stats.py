"""Counts of a sampling engine."""

from __future__ import annotations

from typing import NamedTuple

from lightning_core.backends.torch.engine import TorchBackend


class EngineStats(NamedTuple):
    """Counts since the start of the engine, of all models together."""

    requests: int
    prompt_tokens: int
    prompt_tokens_computed: int
    sampled_tokens: int
    decode_steps: int


def stats_of(backend: TorchBackend) -> EngineStats:
    """The counts of ``backend``. Prefix sharing saved the fraction ``1 - prompt_tokens_computed / prompt_tokens`` of the prefill."""
    lanes = set(backend._lanes.values())
    names = EngineStats._fields[1:]
    return EngineStats(backend.submitted, *(sum(getattr(lane, name) for lane in lanes) for name in names))
