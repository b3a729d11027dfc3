"""The rewards of all attempts at a task over the steps of a run, as a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lightning_core.records.statistics.task_history import RewardedAttempt
from lightning_core.tools.view.scatter import make_ticks

WIDTH, HEIGHT = 800, 220
_SPREAD = 0.35
"""Half the width that the attempts of one step take, in steps."""
_MOST = 5000
"""Largest number of dots; of more attempts, every n-th is drawn."""


class AttemptDot(NamedTuple):
    """One attempt. ``y`` grows downward, as in SVG."""

    x: float
    y: float
    ordinal: int
    kind: str
    """``train``, ``before``, ``during`` or ``after``."""
    label: str


class AttemptsPlot(NamedTuple):
    """Dots, and the places and labels of the ticks."""

    dots: Sequence[AttemptDot]
    steps: Sequence[tuple[float, str]]
    rewards: Sequence[tuple[float, str]]
    kinds: Sequence[str]
    nth: int
    """Every n-th attempt is drawn."""


def make_attempts_plot(attempts: Sequence[RewardedAttempt]) -> AttemptsPlot:
    """``attempts`` with steps on the horizontal axis, the attempts of a step beside each other."""
    nth = len(attempts) // _MOST + 1
    attempts = attempts[::nth]
    steps = [attempt.step for attempt in attempts] or [0]
    values = [attempt.reward for attempt in attempts] or [0.0]
    first, last = min(steps) - 0.5, max(steps) + 0.5
    low, high = min(*values, 0.0), max(*values, 0.0)
    low, high = low - (high - low or 1) * 0.08, high + (high - low or 1) * 0.08
    beside, placed = Counter(steps), Counter[int]()
    dots: list[AttemptDot] = []
    for ordinal, step, phase, reward in attempts:
        offset = (placed[step] + 0.5) / beside[step] * 2 - 1
        placed[step] += 1
        dots.append(
            AttemptDot(
                x=(step + offset * _SPREAD - first) / (last - first) * WIDTH,
                y=HEIGHT - (reward - low) / (high - low) * HEIGHT,
                ordinal=ordinal,
                kind=_kind(phase),
                label=f"rollout {ordinal}, {phase} at step {step}: {reward:.3f}",
            )
        )
    return AttemptsPlot(
        dots=dots,
        steps=[((t - first) / (last - first) * WIDTH, f"{t:g}") for t in make_ticks(first, last, 12) if t == int(t)],
        rewards=[(HEIGHT - (t - low) / (high - low) * HEIGHT, f"{t:g}") for t in make_ticks(low, high, 6)],
        kinds=list(dict.fromkeys(dot.kind for dot in dots)),
        nth=nth,
    )


def _kind(phase: str) -> str:
    return {"train": "train", "eval_before": "before", "eval_after": "after"}.get(phase, "during")
