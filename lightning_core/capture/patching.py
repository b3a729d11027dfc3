"""Wraps on other people's functions that come off again.

Rules of this module:

- A wrap is inert while ``enabled()`` is false: the call goes straight through to what was there before.
- ``undo`` leaves ``vars()`` of every owner exactly as it was found: the raw descriptor is put back (a staticmethod stays one), and
  what was only inherited is deleted again.
- What a third party has wrapped on top of ours since then is theirs to take off. We leave it alone, and ours beneath it goes
  inert for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""``(wrapped, instance, args, kwargs) -> result``, as wrapt calls it; ``wrapped`` is bound already."""


@dataclass(slots=True, eq=False)
class _Wrap:
    owner: Any
    attribute: str
    original: Any
    """The raw descriptor, not what attribute access makes of it."""
    inherited: bool
    wrapper: Wrapper
    live: bool = True
    installed: Any = None


class _Installed(wrapt.FunctionWrapper[..., Any]):
    """A wrapper of ours, told from a third party's by its type."""

    def __init__(self, wrap: _Wrap, enabled: Callable[[], bool]) -> None:
        super().__init__(wrap.original, wrap.wrapper, enabled=enabled)
        self._self_wrap = wrap  # a name that wrapt keeps on the wrapper itself

    @property
    def lightning_wrap(self) -> _Wrap:
        return self._self_wrap


class Patches:
    """A set of wraps that are put on one by one and taken off together. Thread-safe."""

    def __init__(self, enabled: Callable[[], bool]) -> None:
        self._enabled = enabled
        self._wraps: list[_Wrap] = []
        self._lock = threading.RLock()

    @property
    def owners(self) -> tuple[Any, ...]:
        """The modules and classes that carry a wrap of this set, each once."""
        with self._lock:
            return tuple({id(wrap.owner): wrap.owner for wrap in self._wraps}.values())

    def wrap(self, target: Any, attribute: str, wrapper: Wrapper) -> None:
        """Wrap ``attribute``, which may be a dotted path, of a module (or its name) or a class.

        Wrapping the same place with the same ``wrapper`` again does nothing. Raises AttributeError or ImportError (wrapt's
        subclasses of them) if there is no such place.
        """
        owner, name, original = wrapt.resolve_path(target, attribute)
        with self._lock:
            if any(w.owner is owner and w.attribute == name and w.wrapper is wrapper for w in self._wraps):
                return
            wrap = _Wrap(owner, name, original, name not in vars(owner), wrapper)
            wrap.installed = _Installed(wrap, lambda: wrap.live and self._enabled())
            setattr(owner, name, wrap.installed)
            self._wraps.append(wrap)

    def undo(self) -> None:
        """Take all wraps off, the last first. Calls that are under way end as they began."""
        with self._lock:
            while self._wraps:
                wrap = self._wraps.pop()
                wrap.live = False
                if vars(wrap.owner).get(wrap.attribute) is not wrap.installed:
                    continue
                # Beneath may lie one of another set, which was undone while this one covered it.
                while (
                    not wrap.inherited and type(wrap.original) is _Installed and not wrap.original.lightning_wrap.live
                ):
                    wrap = wrap.original.lightning_wrap
                if wrap.inherited:
                    delattr(wrap.owner, wrap.attribute)
                else:
                    setattr(wrap.owner, wrap.attribute, wrap.original)
