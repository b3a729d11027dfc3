"""The learning rate of ``trainer.learning_rate: auto``."""

from __future__ import annotations

from typing import Final, Literal

_HIGHEST: Final = 2e-5
"""For models of up to `_MEASURED` weights; docs/decisions/0015-defaults.md compares it with others."""
_MEASURED: Final = 135e6
_LOWEST: Final = 1e-6
"""The rate that verl's examples use for models of 7 billion weights."""
_ADAPTERS: Final = 1e-4
"""Adapters take about ten times the rate of all weights, which depends little on the model's size (Schulman et al., "LoRA Without
Regret", 2025)."""


def learning_rate(given: float | Literal["auto"], weights: int, tuning: Literal["full", "lora"]) -> float:
    """``given``, or for ``auto`` a rate inversely proportional to the model's number of ``weights``, between two bounds."""
    if given != "auto":
        return given
    if tuning == "lora":
        return _ADAPTERS
    return max(_LOWEST, _HIGHEST * min(1.0, _MEASURED / max(1, weights)))
