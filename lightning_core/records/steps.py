"""The steps of a running run: recorded, shown, and watched by its monitors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_core.config import Config
from lightning_core.config.monitors import configured_monitors, stopping_monitors
from lightning_core.observers.early_stop import budget_stop, expected_steps
from lightning_core.observers.monitors import Alert, HeldOut, raised
from lightning_core.observers.progress import Progress
from lightning_core.records.report import MetricsLog, finite_or_none
from lightning_core.records.store import Store


class StepLog:
    """Records the steps of a run in its store and in ``metrics.jsonl``."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        store: Store,
        progress: Progress,
        *,
        after: int,
        held_out: Callable[[], HeldOut],
    ) -> None:
        """Drop what was recorded after the first ``after`` steps. ``held_out``: returns the evaluations so far.

        Raises `ConfigError` as `configured_monitors` does.
        """
        self._monitors = configured_monitors(config.monitors)
        self._stop = stopping_monitors(config.monitors)
        self._total = config.trainer.steps
        self._budget = config.trainer.token_budget
        self._store = store
        self._progress = progress
        self._held_out = held_out
        store.rewind(after)
        self._metrics = MetricsLog(folder / "metrics.jsonl", keep_steps=after)
        known = {step: rewards for step, rewards in held_out().items() if step < after}
        self._held = raised(self._metrics.lines, known, self._monitors)

    def add(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """Record and show one step, with ``monitor/NAME: 1`` for each monitor that holds after it; returns what is recorded.

        A monitor's message is shown when it starts to hold.
        """
        metrics = finite_or_none(metrics)
        before, self._held = (
            self._held,
            raised([*self._metrics.lines, {"step": step, **metrics}], self._held_out(), self._monitors),
        )
        metrics = {**metrics, **{alert.metric: 1.0 for alert in self._held}}
        self._store.add_step(step, metrics)
        self._metrics.append(step, metrics)
        self._progress.step(step, expected_steps(self._total, self._budget, self._metrics.lines), metrics)
        for alert in self._held:
            if alert.source not in {earlier.source for earlier in before}:
                self._progress.message(f"monitor {alert}")
        return metrics

    def stop_reason(self) -> str | None:
        """Why the run ends early; None if no monitor under ``monitors.stop`` holds and tokens are left in the budget."""
        return monitor_stop(self._held, self._stop) or budget_stop(self._budget, self._metrics.lines)


def monitor_stop(held: Sequence[Alert], stop: Collection[str]) -> str | None:
    """The first monitor of ``stop`` among those that hold, with its message."""
    return next((f"monitor {alert}" for alert in held if alert.monitor in stop and not alert.broken), None)
