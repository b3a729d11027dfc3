"""Wraps functions of other packages, and removes the wraps exactly.

- A wrap does nothing while ``enabled()`` is false: the call goes to the original.
- ``undo`` restores ``vars()`` of every owner exactly: the raw descriptor is put back (a staticmethod stays one), and an attribute
  that was only inherited is deleted.
- A third party's wrap on top of ours is left in place; ours below it is disabled permanently.
- A third party may also replace a wrap, or call the original that it captured earlier. `Patches.find_bypassed` finds this by the original's
  frame, which no other code can replace.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import CodeType, ModuleType
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
    reached: bool = False
    """Whether a call went through it."""
    installed: Any = None

    def is_enabled(self, enabled: Callable[[], bool]) -> bool:
        """Called by wrapt at each call: whether the wrapper runs."""
        self.reached = True
        return self.live and enabled()

    @property
    def code(self) -> CodeType | None:
        """The code of the original, or None if other functions may have the same: a decorator's, or an inherited method's."""
        function = inspect.unwrap(getattr(self.original, "__func__", self.original))
        code = getattr(function, "__code__", None)
        is_own = isinstance(code, CodeType) and code.co_name == self.attribute and not self.inherited
        return code if is_own else None

    def __str__(self) -> str:
        """The wrapped function, and which module's code replaced the wrap, for messages."""
        is_module = isinstance(self.owner, ModuleType)
        place = self.owner.__name__ if is_module else f"{self.owner.__module__}.{self.owner.__qualname__}"
        now = vars(self.owner).get(self.attribute)
        module = getattr(getattr(now, "_self_wrapper", now), "__globals__", {}).get("__name__")
        by = f" (replaced by code of {module})" if now is not self.installed and module else ""
        return f"{place}.{self.attribute}{by}"


class _Installed(wrapt.FunctionWrapper[..., Any]):
    """A wrapper made here; its type distinguishes it from a third party's."""

    def __init__(self, wrap: _Wrap, enabled: Callable[[], bool]) -> None:
        super().__init__(wrap.original, wrap.wrapper, enabled=lambda: wrap.is_enabled(enabled))
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
        self._wraps: dict[tuple[int, str, int], _Wrap] = {}
        """The wraps by the identities of owner and wrapper, which they keep alive, in order."""
        self._codes: dict[CodeType, list[_Wrap]] = {}
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
            key = id(owner), name, id(wrapper)
            if key in self._wraps:
                return
            wrap = _Wrap(owner, name, original, name not in vars(owner), wrapper)
            wrap.installed = _Installed(wrap, (lambda: True) if everywhere else self._enabled)
            setattr(owner, name, wrap.installed)
            self._wraps[key] = wrap
            if (code := wrap.code) is not None:
                self._codes.setdefault(code, []).append(wrap)

    def wrap_function(self, function: Callable[..., Any], wrapper: Wrapper) -> None:
        """Wrap ``function`` in each loaded module of its package that refers to it by its name, itself or wrapped by other code.

        Wraps of other code may call each other, so one call may go through ``wrapper`` twice.
        """
        package, name, inner = f"{function.__module__.partition('.')[0]}.", function.__name__, inspect.unwrap(function)
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(package) and inspect.unwrap(vars(module).get(name, str)) is inner:
                self.wrap(module, name, wrapper)

    def find_bypassed(self, running: Iterable[CodeType]) -> str | None:
        """A wrapped function that is among ``running``, although no call ever went through a wrap of it; None if there is none."""
        for code in running:
            wraps = self._codes.get(code)
            if wraps is not None and not any(wrap.reached for wrap in wraps):
                return str(wraps[0])
        return None

    def on_undo(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in `undo`: it reverts a change that is not a wrap."""
        self._undo.callback(callback)

    def undo(self) -> None:
        """Remove all wraps, last first. Calls in progress finish with the wrap."""
        with self._lock, self._undo:
            self._codes.clear()
            while self._wraps:
                _, wrap = self._wraps.popitem()
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
