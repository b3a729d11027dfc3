"""The learning rate of ``trainer.learning_rate: auto``."""

from __future__ import annotations

from typing import Final, Literal

_HIGHEST: Final = 5e-5
"""The rate for a model of `_MEASURED` weights: the best of those that docs/decisions/0015-defaults.md compares."""
_MEASURED: Final = 135e6
_LOWEST: Final = 1e-6
"""The rate that verl's examples use for models of 7 billion weights, which the rule reaches at about that size."""
_LORA: Final = 10
"""Adapters take about ten times the rate of all weights (Schulman et al., "LoRA Without Regret", 2025)."""


def learning_rate(given: float | Literal["auto"], weights: int, tuning: Literal["full", "lora"]) -> float:
    """``given``, or for ``auto`` a rate inversely proportional to the model's number of ``weights``, between two bounds."""
    if given != "auto":
        return given
    rate = max(_LOWEST, _HIGHEST * min(1.0, _MEASURED / max(1, weights)))
    return rate * _LORA if tuning == "lora" else rate
