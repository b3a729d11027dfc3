"""Programs around the bandit's agent whose episodes earn what credit is to be tested with."""

from __future__ import annotations

from typing import Any

from lightning_core import reward
from tests.bandit import talk


def silent(task: dict[str, Any]) -> str:
    """Earns nothing by itself: somebody else must say how good it was."""
    text = talk(task["prompt"])
    reward(0.0)
    return text


def mostly_equal(task: dict[str, Any]) -> float:
    """Three tasks of four earn 1 whatever is said."""
    text = talk(task["prompt"])
    return sum("a" <= c <= "z" for c in text) / 4 if int(task["id"][1:]) % 4 == 0 else 1.0
