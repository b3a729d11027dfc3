"""Wraps functions of other packages, and removes the wraps exactly.

- A wrap does nothing while ``enabled()`` is false: the call goes to the original.
- ``undo`` restores ``vars()`` of every owner exactly: the raw descriptor is put back (a staticmethod stays one), and an attribute
  that was only inherited is deleted.
- A third party's wrap on top of ours is left in place; ours below it is disabled permanently.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""``(wrapped, instance, args, kwargs) -> result``; wrapt has bound ``wrapped``."""


@dataclass(slots=True, eq=False)
class _Wrap:
    owner: Any
    attribute: str
    original: Any
    """The raw descriptor from ``vars``, not the result of attribute access."""
    inherited: bool
    wrapper: Wrapper
    live: bool = True
    installed: Any = None


class _Installed(wrapt.FunctionWrapper[..., Any]):
    """A wrapper made here; its type distinguishes it from a third party's."""

    def __init__(self, wrap: _Wrap, enabled: Callable[[], bool]) -> None:
        super().__init__(wrap.original, wrap.wrapper, enabled=enabled)
        self._self_wrap = wrap  # wrapt stores ``_self_`` attributes on the wrapper, not on the wrapped

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a wrapped function by its name, as the function itself; wrapt's proxies refuse."""
        wrap = self._self_wrap
        owner = wrap.owner.__name__ if isinstance(wrap.owner, ModuleType) else wrap.owner
        return _attribute, (owner, wrap.attribute)

    @property
    def lightning_wrap(self) -> _Wrap:
        return self._self_wrap


def _attribute(owner: Any, name: str) -> Any:
    return getattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name)


class Patches:
    """A set of wraps that are added one by one and removed together. Thread-safe."""

    def __init__(self, enabled: Callable[[], bool]) -> None:
        self._enabled = enabled
        self._wraps: list[_Wrap] = []
        self._undo = ExitStack()
        self._lock = threading.RLock()

    def wrap(self, target: Any, attribute: str, wrapper: Wrapper, *, everywhere: bool = False) -> None:
        """Wrap ``attribute`` of ``target``: a module, its name, or a class.

        ``everywhere``: regardless of ``enabled()``, for a function that finds out which rollout it works for, or that works for none.
        ``attribute`` may be a dotted path. Wrapping the same attribute with the same ``wrapper`` again does
        nothing. Raises AttributeError or ImportError (wrapt's subclasses) if the attribute does not exist.
        """
        owner, name, original = wrapt.resolve_path(target, attribute)
        with self._lock:
            if any(w.owner is owner and w.attribute == name and w.wrapper is wrapper for w in self._wraps):
                return
            wrap = _Wrap(owner, name, original, name not in vars(owner), wrapper)
            wrap.installed = _Installed(wrap, lambda: wrap.live and (everywhere or self._enabled()))
            setattr(owner, name, wrap.installed)
            self._wraps.append(wrap)

    def on_undo(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in `undo`: it reverts a change that is not a wrap."""
        self._undo.callback(callback)

    def undo(self) -> None:
        """Remove all wraps, last first. Calls in progress finish with the wrap."""
        with self._lock, self._undo:
            while self._wraps:
                wrap = self._wraps.pop()
                wrap.live = False
                if vars(wrap.owner).get(wrap.attribute) is not wrap.installed:
                    continue
                # The original may be a wrap of another set, undone while this wrap was on top of it.
                while (
                    not wrap.inherited and type(wrap.original) is _Installed and not wrap.original.lightning_wrap.live
                ):
                    wrap = wrap.original.lightning_wrap
                if wrap.inherited:
                    delattr(wrap.owner, wrap.attribute)
                else:
                    setattr(wrap.owner, wrap.attribute, wrap.original)
