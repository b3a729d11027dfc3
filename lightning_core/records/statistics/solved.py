"""The rewards that count as solved; ``eval.solved``."""

from __future__ import annotations

ROUNDING = 1e-9
"""Rewards are sums and means of floats: a full reward may be less than 1 by its last digits."""


def is_solved(reward: float, solved: float) -> bool:
    """Whether ``reward`` counts as solved. ``solved``: the threshold, up to rounding."""
    return reward >= solved - ROUNDING
