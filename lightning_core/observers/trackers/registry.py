"""Finds the factories of the trackers in ``run.report_to``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from lightning_core.config import Config
from lightning_core.config.imports import import_callable
from lightning_core.errors import MissingExtra
from lightning_core.observers.trackers.tracker import TrackedRun, Tracker

TrackerFactory = Callable[[TrackedRun], Tracker]


class _BuiltIn(NamedTuple):
    package: str
    """What its factory imports."""
    factory: str
    """``module:callable``."""


BUILT_IN: Mapping[str, _BuiltIn] = {
    name: _BuiltIn(package, f"lightning_core.observers.trackers.{name}:{factory}")
    for name, package, factory in (
        ("tensorboard", "tensorboardX", "TensorBoardTracker"),
        ("wandb", "wandb", "WandbTracker"),
        ("mlflow", "mlflow", "MlflowTracker"),
        ("trackio", "trackio", "TrackioTracker"),
    )
}


def tracker_factories(config: Config) -> dict[str, TrackerFactory]:
    """The factories of ``run.report_to``, by name.

    Raises `MissingExtra` for a package that is not installed, and `ConfigError` for a ``module:callable`` that does not exist.
    """
    return {name: _factory(name) for name in config.run.report_to}


def _factory(name: str) -> TrackerFactory:
    known = BUILT_IN.get(name)
    if known is None:
        return import_callable(name, key="run.report_to")
    # Not imported here, since it takes seconds. A spec without origin is a folder of that name, such as ./wandb.
    spec = find_spec(known.package)
    if spec is None or spec.origin is None:
        raise MissingExtra(known.package, name, f"run.report_to: {name}")
    module, _, factory = known.factory.partition(":")
    return getattr(import_module(module), factory)
