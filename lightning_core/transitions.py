"""Trace → transitions → rows: what the trainer trains on, and where each number in it comes from. (being written)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.uint32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where one call's sampled tokens stand in a row: ``row.token_ids[start:stop]``."""

    call: str
    start: int
    stop: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence of L tokens: a path from the root to a leaf in an agent's forest of contexts."""

    rollout: str
    agent: str
    policy: str
    token_ids: TokenIds
    """uint32 [L]: exactly what the model saw and sampled."""
    mask: NDArray[np.bool_]
    """bool [L]: True where the token was sampled in this row. Every sampled token is True in exactly one row."""
    logprobs: Floats
    """float32 [L]: logprob at sampling, at the sampling temperature; 0 where the mask is False."""
    temperatures: Floats
    """float32 [L]: temperature that the token was sampled at; 1 where the mask is False."""
    advantages: Floats | None
    """float32 [L], 0 where the mask is False; None until credit has been assigned."""
    segments: tuple[Segment, ...]
    """The calls whose tokens this row trains, in order."""
