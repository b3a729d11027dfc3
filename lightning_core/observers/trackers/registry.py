"""Finds the factories of the trackers in ``run.report_to``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from lightning_core.config import Config
from lightning_core.config.imports import import_callable
from lightning_core.config.types import is_callable_name
from lightning_core.errors import MissingExtra
from lightning_core.observers.trackers.tracker import TrackedRun, Tracker

TrackerFactory = Callable[[TrackedRun], Tracker]


def tracker_factories(config: Config) -> dict[str, TrackerFactory]:
    """The factories of ``run.report_to``, by name.

    Raises `MissingExtra` for a package that is not installed, and `ConfigError` for a ``module:callable`` that does not exist.
    """
    return {name: _factory(name) for name in config.run.report_to}


def _factory(name: str) -> TrackerFactory:
    if is_callable_name(name):
        return import_callable(name, key="run.report_to")
    module = import_module(f"lightning_core.observers.trackers.{name}")
    # Not imported here, since it takes seconds. A spec without origin is a folder of that name, such as ./wandb.
    spec = find_spec(module.PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingExtra(module.PACKAGE, name, f"run.report_to: {name}")
    return module.TRACKER
