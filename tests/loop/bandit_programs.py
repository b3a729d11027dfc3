"""Programs around the bandit's agent with rewards for tests of credit."""

from __future__ import annotations

from typing import Any

from lightning_core import reward
from tests.bandit import talk


def silent(task: dict[str, Any]) -> str:
    """Earns nothing itself: a judge must score it."""
    text = talk(task["prompt"])
    reward(0.0)
    return text


def mostly_equal(task: dict[str, Any]) -> float:
    """Three of four tasks earn 1 for any response."""
    text = talk(task["prompt"])
    return sum("a" <= c <= "z" for c in text) / 4 if int(task["id"][1:]) % 4 == 0 else 1.0
