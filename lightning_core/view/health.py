"""The monitors that held in a run, with their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_core.errors import CreditError
from lightning_core.monitors import HeldOut, Watched, raised, watched
from lightning_core.records.runs import RunInfo

_PREFIX = "monitor/"


class HealthAlert(NamedTuple):
    """A monitor that held after a step."""

    monitor: str
    steps: Sequence[int]
    """The steps after which it held."""
    holds: bool
    """Whether it holds after the newest step."""
    messages: Sequence[str]
    """What was found and what to change, for each policy that it is about; empty for a monitor of the run's own code."""

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
    """The monitors that held in ``metrics``, those that hold now first; ``held_out``: as monitors get it."""
    found: dict[str, list[int]] = {}
    for line in metrics:
        for key, value in line.items():
            if key.startswith(_PREFIX) and value:
                found.setdefault(key.removeprefix(_PREFIX), []).append(line["step"])
    newest = metrics[-1]["step"] if metrics else None
    messages = {step: _messages(run, metrics, held_out, step) for step in {steps[-1] for steps in found.values()}}
    alerts = [
        HealthAlert(name, steps, steps[-1] == newest, messages[steps[-1]].get(name, ()))
        for name, steps in found.items()
    ]
    return sorted(alerts, key=lambda alert: (not alert.holds, -alert.steps[-1]))


def _messages(run: RunInfo, metrics: Sequence[Mapping[str, Any]], held_out: HeldOut, step: int) -> dict[str, list[str]]:
    """The messages by monitor after ``step``, as the run reported them: before the evaluation that followed, unless it ended then."""
    history = [line for line in metrics if line["step"] <= step]
    known = {at: tasks for at, tasks in held_out.items() if at < step or len(history) == len(metrics)}
    found: dict[str, list[str]] = {}
    for alert in raised(history, known, _watched(run)):
        prefix = "" if alert.policy is None else f"policy {alert.policy}: "
        found.setdefault(alert.monitor, []).append(f"{prefix}{alert.message}")
    return found


def _watched(run: RunInfo) -> list[Watched]:
    """Lightning's own monitors with the run's arguments. Those under ``monitors.add`` are left out: viewing runs no code of a run."""
    section = run.config.get("monitors")
    args = section.get("args") if isinstance(section, dict) else None
    own = watched()
    try:
        return (
            watched(args={one.rule.name: args[one.rule.name] for one in own if one.rule.name in args}) if args else own
        )
    except (CreditError, TypeError, ValueError):
        return own
