"""Finds runs that do not learn, from the metrics of their steps.

A monitor is a pure function in a registry; no torch, no I/O. It gets the metrics of the steps so far and the held-out rewards,
and returns a message while something is wrong: what was found, the most likely cause, and what to change.

`config.monitor_registry` describes how to add one.
"""

from lightning_core.config.monitor_registry import MONITORS, HeldOut, History, Watched, monitor, watched
from lightning_core.observers.monitors import agents, gradient, policy, rewards
from lightning_core.observers.monitors.watch import Alert, alerts, new_alerts, raised

_DECLARED = (agents, gradient, policy, rewards)
"""Imported to register their monitors."""

__all__ = [
    "MONITORS",
    "Alert",
    "HeldOut",
    "History",
    "Watched",
    "alerts",
    "monitor",
    "new_alerts",
    "raised",
    "watched",
]
