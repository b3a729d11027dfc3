"""The rewards of all attempts at a task over the steps of a run, as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_core.records.store import RolloutRecord
from lightning_core.view.scatter import make_ticks

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


def make_attempts_plot(attempts: Sequence[RolloutRecord]) -> AttemptsPlot:
    """The attempts with a reward: steps on the horizontal axis, the attempts of a step beside each other."""
    rewarded = [(record, record.reward) for record in attempts if record.reward is not None]
    rewarded = rewarded[:: len(rewarded) // _MOST + 1]
    steps = [record.step for record, _ in rewarded] or [0]
    values = [reward for _, reward in rewarded] or [0.0]
    first, last = min(steps) - 0.5, max(steps) + 0.5
    low, high = min(*values, 0.0), max(*values, 0.0)
    low, high = low - (high - low or 1) * 0.08, high + (high - low or 1) * 0.08
    places: dict[int, list[int]] = {}
    for record, _ in rewarded:
        places.setdefault(record.step, []).append(record.ordinal)
    dots: list[AttemptDot] = []
    for record, reward in rewarded:
        beside = places[record.step]
        offset = (beside.index(record.ordinal) + 0.5) / len(beside) * 2 - 1 if len(beside) > 1 else 0.0
        dots.append(
            AttemptDot(
                x=(record.step + offset * _SPREAD - first) / (last - first) * WIDTH,
                y=HEIGHT - (reward - low) / (high - low) * HEIGHT,
                ordinal=record.ordinal,
                kind=_kind(record.phase),
                label=f"rollout {record.ordinal}, {record.phase} at step {record.step}: {reward:.3f}",
            )
        )
    return AttemptsPlot(
        dots=dots,
        steps=[((t - first) / (last - first) * WIDTH, f"{t:g}") for t in make_ticks(first, last, 12) if t == int(t)],
        rewards=[(HEIGHT - (t - low) / (high - low) * HEIGHT, f"{t:g}") for t in make_ticks(low, high, 6)],
        kinds=list(dict.fromkeys(dot.kind for dot in dots)),
    )


def _kind(phase: str) -> str:
    return {"train": "train", "eval_before": "before", "eval_after": "after"}.get(phase, "during")
