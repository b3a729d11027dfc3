"""Adds the keys of signals to sections of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from pydantic import create_model

from lightning_core.config.types import Section
from lightning_core.credit.signal_names import SIGNALS

S = TypeVar("S", bound=Section)


@cache
def declarations() -> Mapping[str, Any]:
    """The `SignalSection` of each signal, by name."""
    return {name: import_module(f"lightning_core.signals.{name}.section").SECTION for name in SIGNALS}


def with_signal_keys(section: str) -> Callable[[type[S]], type[S]]:
    """Class decorator that adds the keys of signals to the section ``section``."""

    def extend(model: type[S]) -> type[S]:
        added = [own.keys for own in declarations().values() if own.section == section and own.keys is not None]
        # Pydantic collects fields from the last base to the first.
        bases = (*reversed(added), model)
        return create_model(model.__name__, __base__=bases, __module__=model.__module__, __doc__=model.__doc__)

    return extend
