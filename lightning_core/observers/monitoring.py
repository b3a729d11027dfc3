"""Watches a run with its monitors: their messages, metrics, stops, and their part of the summary."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from lightning_core.config import Config
from lightning_core.config.monitors import configured_monitors, stopping_monitors
from lightning_core.observers.monitors import Alert, HeldOut, alerts, raised
from lightning_core.records.observer import ObservedRun, Observer
from lightning_core.records.report import Summary
from lightning_core.records.results import Evaluation, Recorded
from lightning_core.records.statistics.held_out import held_out_by_task
from lightning_core.records.statistics.summary import RaisedMonitor
from lightning_core.records.store import Phase


class Monitoring(Observer):
    """Evaluates the monitors after each step. One under ``monitors.stop`` ends the run.

    A step's metrics have ``monitor/NAME: 1`` for each monitor that holds. Its message is shown when it starts to hold.
    """

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` as `configured_monitors` does."""
        self._monitors = configured_monitors(config.monitors)
        self._stop = stopping_monitors(config.monitors)
        self._before: Sequence[Alert] = ()
        self._held: Sequence[Alert] = ()
        self._held_out: HeldOut | None = None
        """The rewards of the recorded evaluations; None: not read."""

    def open(self, run: ObservedRun) -> None:
        self._run = run

    def start(self, recorded: Recorded) -> None:
        self._recorded = recorded
        known = {step: rewards for step, rewards in self._read_held_out().items() if step < recorded.steps}
        self._held = raised(recorded.lines, known, self._monitors)

    def measure(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float]:
        history = [*self._recorded.lines, {"step": step, **metrics}]
        self._before, self._held = self._held, raised(history, self._read_held_out(), self._monitors)
        return {alert.metric: 1.0 for alert in self._held}

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        for alert in self._held:
            if alert.source not in {earlier.source for earlier in self._before}:
                self._run.show(f"monitor {alert}")

    def on_evaluation(self, step: int, phase: Phase, evaluation: Evaluation) -> None:
        self._held_out = None

    def stop_reason(self) -> str | None:
        return monitor_stop(self._held, self._stop)

    def summarize(self, summary: Summary, recorded: Recorded) -> Summary:
        raised = alerts(recorded.lines, held_out_by_task(recorded.store), self._monitors)
        stopped = None
        if recorded.lines and recorded.steps < self._run.steps:
            newest = recorded.lines[-1]
            held = [alert for alert in raised if alert.step == recorded.steps and newest.get(alert.metric)]
            stopped = monitor_stop(held, self._stop)
        return replace(summary, stopped=summary.stopped or stopped, monitors=tuple(raised_monitors(raised)))

    def _read_held_out(self) -> HeldOut:
        if self._held_out is None:
            self._held_out = held_out_by_task(self._recorded.store)
        return self._held_out


def monitor_stop(held: Sequence[Alert], stop: Collection[str]) -> str | None:
    """The first monitor of ``stop`` among those that hold, with its message."""
    return next((f"monitor {alert}" for alert in held if alert.monitor in stop and not alert.broken), None)


def raised_monitors(raised: Sequence[Alert]) -> list[RaisedMonitor]:
    """The monitors that were raised, in the order of their first step. ``raised``: see `alerts`."""
    by_source = groupby(sorted(raised, key=lambda a: (a.monitor, a.policy or "", a.step)), key=lambda a: a.source)
    held = [list(group) for _, group in by_source]
    return [
        RaisedMonitor(
            monitor=alerts[0].monitor,
            policy=alerts[0].policy,
            first_step=alerts[0].step,
            last_step=alerts[-1].step,
            steps=len(alerts),
            message=alerts[-1].message,
        )
        for alerts in sorted(held, key=lambda alerts: alerts[0].step)
    ]
