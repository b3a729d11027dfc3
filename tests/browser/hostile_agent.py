"""An agent whose prompts, tasks and errors are HTML."""

from __future__ import annotations

from typing import Any

from tests.bandit import talk
from tests.tools.view.made_runs import HOSTILE


def solve(task: dict[str, Any]) -> float:
    """Every other task fails after its call."""
    talk(f"say {HOSTILE}")
    if task["fails"]:
        raise ValueError(f"no {HOSTILE}")
    return 0.5


def tasks() -> list[dict[str, Any]]:
    return [{"id": f"{HOSTILE} {number}", "fails": number % 2 == 1} for number in range(2)]
