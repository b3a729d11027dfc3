"""References to functions that another process can import."""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_core.config.imports import import_callable
from lightning_core.errors import ConfigError, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReference:
    """A function that another process can load."""

    name: str | None = None
    """``module:callable``."""
    pickled: str | None = None
    """The pickled object in base64, if it has no name."""

    def load(self, key: str) -> Callable[..., Any]:
        """The function, imported in this process. ``key``: the setting that it comes from, for errors."""
        if self.name is not None:
            return import_callable(self.name, key=key)
        assert self.pickled is not None
        return pickle.loads(base64.b64decode(self.pickled))


def reference(function: Callable[..., Any], key: str, *, configured: str | None, named_only: bool) -> FunctionReference:
    """The reference by which another process loads ``function``. Raises `ConfigError` if it cannot.

    ``configured``: the name under ``key`` in the configuration, if any. ``named_only``: refuse a pickled object, whose state
    another process has a copy of.
    """
    for name in (configured, _own_name(function)):
        if name is not None and _is_at(function, name):
            return FunctionReference(name=name)
    module = getattr(function, "__module__", None)
    if module == "__main__":
        raise _unsupported(key, function, "it is defined in the program that was started (__main__)")
    if named_only or hasattr(function, "__code__"):
        raise _unsupported(key, function, "it is not at the top level of a module")
    try:
        return FunctionReference(pickled=base64.b64encode(pickle.dumps(function)).decode())
    except Exception as error:  # noqa: BLE001 - pickling runs the object's own code
        raise _unsupported(key, function, f"it cannot be pickled ({describe(error)})") from None


def _own_name(function: Callable[..., Any]) -> str | None:
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}:{path}" if isinstance(module, str) and isinstance(path, str) else None


def _is_at(function: Callable[..., Any], name: str) -> bool:
    module, _, path = name.partition(":")
    if module == "__main__":
        return False
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is function


def _unsupported(key: str, function: Callable[..., Any], why: str) -> ConfigError:
    return ConfigError(
        f"{key}: {function!r:.120} cannot run in another process: {why}. Move it to the top level of a separate module, or set "
        "rollouts.executor to task or thread"
    )
