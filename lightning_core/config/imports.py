"""Imports the objects that a configuration names as ``module:callable``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_core.errors import ConfigError


def import_callable(name: str, *, key: str) -> Callable[..., Any]:
    """Import ``module:callable``; the working directory is searched as by ``python -m``.

    Raises `ConfigError` with the configuration's ``key`` if the module or the callable does not
    exist. Exceptions raised by the module during its import propagate.
    """
    module_name, _, path = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its own imports does not
        raise ConfigError(
            f"{key}: no module {error.name!r} for {name!r} in the working directory or the installed packages"
        ) from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key}: the module {module_name!r} has no {path!r}; expected 'module:callable'")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{key}: {name!r} is of type {type(found).__name__}, expected a callable")
    return found
