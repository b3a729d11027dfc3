"""Evaluates the monitors of a run on its metrics: live, or afterwards on stored metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core.config.monitor_registry import HeldOut, History, Watched, watched
from lightning_core.errors import describe

_OWN_METRIC = "/calls"
"""The end of a metric that each policy has, if there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A monitor that holds after a step."""

    monitor: str
    step: int
    message: str
    """The problem, its most likely cause and the setting to change."""
    policy: str | None = None
    """The policy that it is about; None with one policy, or for all."""
    broken: bool = False
    """Whether the monitor raised an exception: the message is about the monitor, not about the run."""

    @property
    def metric(self) -> str:
        """The metric of the step that is 1 while the monitor holds."""
        return f"monitor/{self.monitor}"

    @property
    def source(self) -> tuple[str, str | None]:
        """The monitor and the policy: equal for the same alert after another step."""
        return self.monitor, self.policy

    def __str__(self) -> str:
        return f"{self.monitor}: {'' if self.policy is None else f'policy {self.policy}: '}{self.message}"


def raised(history: History, held_out: HeldOut, monitors: Sequence[Watched] | None = None) -> list[Alert]:
    """The monitors that hold after the newest step of ``history``.

    ``held_out``: the evaluations so far. ``monitors``: the run's; None: Lightning's own.
    """
    return _raised(_views(history), len(history), held_out, watched() if monitors is None else monitors)


def alerts(history: History, held_out: HeldOut, monitors: Sequence[Watched] | None = None) -> list[Alert]:
    """The monitors that held after each step, in order: what the run itself reported.

    A step's monitors were evaluated before its own held-out evaluation, except in the last step, whose monitors include it.
    """
    raised: list[Alert] = []
    views, active = _views(history), watched() if monitors is None else monitors
    for number, line in enumerate(history, start=1):
        newest = number == len(history)
        known = held_out if newest else {step: rewards for step, rewards in held_out.items() if step < line["step"]}
        raised += _raised(views, number, known, active)
    return raised


def new_alerts(raised: Sequence[Alert]) -> list[Alert]:
    """The alerts of ``raised`` (`alerts`) that did not hold after the step before."""
    held = {(*a.source, a.step) for a in raised}
    return [a for a in raised if (*a.source, a.step - 1) not in held]


Views = Mapping[str | None, History]
"""The history as each policy's monitors see it, and as it is (None)."""


def _views(history: History) -> Views:
    names = {key.removesuffix(_OWN_METRIC): None for line in history for key in line if key.endswith(_OWN_METRIC)}
    return {None: history, **{name: [dict(_of_policy(line, name)) for line in history] for name in names}}


def _of_policy(line: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """The metrics of ``line``, with the policy ``name``'s in place of the common metrics."""
    yield from line.items()
    prefix = f"{name}/"
    yield from ((key.removeprefix(prefix), value) for key, value in line.items() if key.startswith(prefix))


def _raised(views: Views, number: int, held_out: HeldOut, monitors: Sequence[Watched]) -> list[Alert]:
    """The monitors that hold after the first ``number`` steps."""
    if not number:
        return []
    raised: list[Alert] = []
    policies = [name for name in views if name is not None]
    for monitor in monitors:
        for policy in policies if monitor.rule.each_policy and policies else [None]:
            history = views[policy][:number]
            message, broken = _message(monitor, history, held_out)
            if message is not None:
                step = int(history[-1]["step"])
                raised.append(
                    Alert(monitor=monitor.rule.name, step=step, message=message, policy=policy, broken=broken)
                )
    held = {alert.source for alert in raised if not alert.broken}
    unless = {monitor.rule.name: monitor.rule.unless for monitor in monitors}
    return [alert for alert in raised if (unless[alert.monitor], alert.policy) not in held]


def _message(monitor: Watched, history: History, held_out: HeldOut) -> tuple[str | None, bool]:
    """The monitor's message, and whether it is an exception that it raised, which must not end the run."""
    try:
        return monitor.rule.function(history, held_out, **monitor.arguments), False
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function can raise anything
        return f"the monitor itself failed: {describe(error)}. Correct it, or remove it from monitors.add", True
