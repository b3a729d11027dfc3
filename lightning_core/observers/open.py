"""The list of observers, and the only module of this package that the core imports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_core.config import Config
from lightning_core.observers.display import Display
from lightning_core.observers.early_stop import Budgets, HeldOutStop
from lightning_core.observers.monitoring import Monitoring
from lightning_core.observers.progress import Progress
from lightning_core.observers.trackers.reporting import Trackers
from lightning_core.records.observer import Observer, Observers

__all__ = ["Progress", "make_display", "make_observers"]

OBSERVERS: Sequence[Callable[[Config], Observer]] = (HeldOutStop, Monitoring, Budgets, Trackers)
"""The observers of every run, after its display. The first reason to stop counts.

Each factory gets the configuration before a folder is created, and raises `ConfigError` or `MissingExtra`.
"""


def make_observers(config: Config, progress: Progress | bool | None = False) -> Observers:
    """The observers of a run, its display first. ``progress``: see `make_display`."""
    return Observers([Display(config, progress), *(make(config) for make in OBSERVERS)])


def make_display(config: Config, progress: Progress | bool | None) -> Observers:
    """The display alone: ``progress`` itself; True: the display that fits; None: a display in notebooks only; False: none."""
    return Observers([Display(config, progress)])
