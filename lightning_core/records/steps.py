"""The steps of a running run: recorded, and passed to its observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_core.records.observer import Observers
from lightning_core.records.report import MetricsLog, finite_or_none
from lightning_core.records.results import Recorded
from lightning_core.records.store import Store


class StepLog:
    """Records the steps of a run in its store and in ``metrics.jsonl``."""

    def __init__(
        self, folder: Path, store: Store, observers: Observers, *, after: int, keep: Iterable[str] = ()
    ) -> None:
        """Drop what was recorded after the first ``after`` steps, except the rollouts ``keep``, and start the observers."""
        self._store = store
        self._observers = observers
        store.rewind(after, keep=keep)
        self._metrics = MetricsLog(folder / "metrics.jsonl", keep_steps=after, stored=store.steps())
        observers.start(Recorded(lines=self._metrics.lines, store=store))

    def add(
        self, step: int, metrics: Mapping[str, float], *, on_recorded: Callable[[], None] = lambda: None
    ) -> Mapping[str, Any]:
        """Record one step with the observers' metrics, then call ``on_recorded`` and the observers; returns the recorded metrics."""
        recorded = finite_or_none(metrics)
        recorded |= self._observers.measure(step, recorded)
        self._store.add_step(step, recorded)
        self._metrics.append(step, recorded)
        on_recorded()  # an observer may raise
        self._observers.on_step(step, recorded)
        return recorded
