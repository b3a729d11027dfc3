"""The monitors that held in a run, with their messages.

They are read from the steps' metrics, and in a finished run also from its summary: only that has the monitors that the final evaluation
raised, and the monitors of runs that do not record them step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from lightning_core.errors import CreditError
from lightning_core.observers.monitors import Alert, HeldOut, Watched, raised, watched
from lightning_core.records.run_folder.runs import RunInfo
from lightning_core.records.statistics.summary import RaisedMonitor

_PREFIX = "monitor/"


class HealthAlert(NamedTuple):
    """A monitor that held after a step."""

    monitor: str
    steps: Sequence[int]
    """The steps after which it held."""
    holds: bool
    """Whether it holds after the newest step."""
    messages: Sequence[str]
    """The problem and the change to make, for each policy that it is about; empty for a monitor of the run's own code."""

    @property
    def since(self) -> int:
        """The first of the last steps after which it held without a break."""
        first = self.steps[-1]
        for step in reversed(self.steps):
            if step < first - 1:
                break
            first = step
        return first


def health(run: RunInfo, metrics: Sequence[Mapping[str, Any]], held_out: HeldOut) -> list[HealthAlert]:
    """The monitors that held in ``run``, those that hold now first; ``held_out``: as monitors get it."""
    held: dict[str, set[int]] = {}
    for line in metrics:
        for key, value in line.items():
            if key.startswith(_PREFIX) and value:
                held.setdefault(key.removeprefix(_PREFIX), set()).add(line["step"])
    summed = () if run.summary is None else run.summary.monitors
    for m in summed:
        first = m.first_step if m.steps == m.last_step - m.first_step + 1 else m.last_step
        held.setdefault(m.monitor, set()).update((m.first_step, *range(first, m.last_step + 1)))
    newest = metrics[-1]["step"] if metrics else None
    messages = cache(lambda step: _messages(run, metrics, held_out, step))
    alerts: list[HealthAlert] = []
    for name, numbers in held.items():
        steps = sorted(numbers)
        texts = [_text(m) for m in summed if (m.monitor, m.last_step) == (name, steps[-1])]
        alerts.append(HealthAlert(name, steps, steps[-1] == newest, texts or messages(steps[-1]).get(name, ())))
    return sorted(alerts, key=lambda alert: (not alert.holds, -alert.steps[-1]))


def _text(alert: Alert | RaisedMonitor) -> str:
    return alert.message if alert.policy is None else f"policy {alert.policy}: {alert.message}"


def _messages(run: RunInfo, metrics: Sequence[Mapping[str, Any]], held_out: HeldOut, step: int) -> dict[str, list[str]]:
    """The messages by monitor after ``step``, as the run reported them: before the evaluation that followed, unless it ended then."""
    history = [line for line in metrics if line["step"] <= step]
    known = {at: tasks for at, tasks in held_out.items() if at < step or len(history) == len(metrics)}
    texts: dict[str, list[str]] = {}
    for alert in raised(history, known, _watched(run)):
        texts.setdefault(alert.monitor, []).append(_text(alert))
    return texts


def _watched(run: RunInfo) -> list[Watched]:
    """Lightning's own monitors with the run's arguments. Those under ``monitors.add`` are left out: viewing runs no code of a run."""
    section = run.config.get("monitors")
    args = section.get("args") if isinstance(section, dict) else None
    monitors = watched()
    try:
        return (
            watched(args={m.rule.name: args[m.rule.name] for m in monitors if m.rule.name in args})
            if args
            else monitors
        )
    except (CreditError, TypeError, ValueError):
        return monitors
