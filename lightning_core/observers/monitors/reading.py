"""Reads windows of a history of metrics. A metric that is missing or None has no value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from lightning_core.config.monitor_registry import History

TINY = 1e-12
"""Differences of means up to this size are rounding."""
_MIN_TASKS = 6


def last(history: History, steps: int) -> History:
    """The last ``steps`` steps; empty if there are fewer."""
    return history[-steps:] if len(history) >= steps else []


def number(line: Mapping[str, Any], *names: str) -> float | None:
    """The first of the metrics ``names`` that has a finite value."""
    for name in names:
        value = line.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def mean(lines: History, *names: str) -> float | None:
    """The mean of a metric (`number`) over the steps that have it; None if no step has it."""
    values = [value for line in lines if (value := number(line, *names)) is not None]
    return fmean(values) if values else None


def weighted_mean(lines: History, name: str, weight: str) -> float:
    """The mean of a metric over the steps that have it, each with the weight ``weight``; 0 if none has any."""
    found = [(value, number(line, weight) or 0.0) for line in lines if (value := number(line, name)) is not None]
    weights = math.fsum(w for _, w in found)
    return math.fsum(value * w for value, w in found) / weights if weights else 0.0


def total(lines: History, *names: str) -> float:
    """The sum of several metrics over ``lines``; a missing one counts as 0."""
    return math.fsum(number(line, name) or 0.0 for line in lines for name in names)


def share(lines: History, part: str, whole: str) -> float | None:
    """The sum of ``part`` as a fraction of the sum of ``whole``; None without steps, or if a step has no ``part``."""
    if not lines or any(number(line, part) is None for line in lines):
        return None
    number_of = total(lines, whole)
    return total(lines, part) / number_of if number_of else None


def solved(lines: History) -> float:
    """The mean share of solved rollouts; 0 if it is not known."""
    return mean(lines, "solved") or 0.0


def significant_fall(before: Mapping[str, float], after: Mapping[str, float], errors: float) -> float | None:
    """The drop of the mean reward of the held-out tasks in both; None if it is less than ``errors`` standard errors, or of few tasks."""
    falls = [before[task] - after[task] for task in before if task in after]
    if len(falls) < _MIN_TASKS or fmean(falls) <= TINY:
        return None
    return fmean(falls) if fmean(falls) > errors * stdev(falls) / math.sqrt(len(falls)) else None


def period(steps: int) -> str:
    """``the last 3 steps``."""
    return "the last step" if steps == 1 else f"the last {steps} steps"
