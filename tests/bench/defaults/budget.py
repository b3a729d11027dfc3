"""Ends a run when its rollouts and updates have used a number of processor seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import psutil

from lightning_core.records.observer import Observer


def processor_seconds() -> float:
    """The processor time of this process and its children, living and ended."""
    total, ended = time.process_time(), os.times()
    total += ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            used = child.cpu_times()
        except psutil.Error:
            continue
        # Of its own children that ended too; those that live are in the list themselves.
        total += used.user + used.system + used.children_user + used.children_system
    return total


class ProcessorBudget(Observer):
    """Counts from the first rollout of a step to its end. Loading, evaluations and checkpoints do not count."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self.seconds = 0.0
        """Processor seconds so far."""
        self._steps = 0
        self._began: float | None = None

    def phase(self, name: str, total: int | None = None) -> None:
        if name == "train" and self._began is None:
            self._began = processor_seconds()

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        assert self._began is not None, "every step begins with the phase train"
        self.seconds += processor_seconds() - self._began
        self._began = None
        self._steps += 1

    def stop_reason(self) -> str | None:
        # Half of a step more: runs with long and with short steps use the budget on average.
        if not self._steps or self.seconds * (1 + 0.5 / self._steps) < self._budget:
            return None
        return f"{self.seconds:.0f} processor seconds were used of {self._budget:.0f}"
