"""The configuration of a run: sections, checks, and the settings of each policy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_core.config.config import Config, dump_config, load_config

__all__ = ["Config", "dump_config", "load_config"]


def __getattr__(name: str) -> object:
    # Loaded on demand: signals import the base class of sections while sections are assembled; worker processes need no sections.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lightning_core.config.config"), name)
