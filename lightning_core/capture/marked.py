"""Objects that carry a mark: callables in a proxy, and instances of a subclass. They copy and pickle with their mark."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import wrapt

from lightning_core.capture.marks import TrainSpec, register_mark
from lightning_core.capture.wrapping import scope_function

T = TypeVar("T")

_MARK = "__lightning__"


class _Mark:
    """The mark of one function. ``functools.wraps`` copies it to wrappers, which are not marked."""

    def __init__(self, function: Any, spec: TrainSpec) -> None:
        register_mark(spec.name, spec.policy)
        self.spec = spec
        self._function = None if function is None else weakref.ref(function)

    def belongs_to(self, function: Any) -> bool:
        """Whether ``function`` is the function that was marked."""
        return self._function is not None and self._function() is function

    def __reduce__(self) -> Any:
        return _Mark, (None if self._function is None else self._function(), self.spec)


def get_mark(obj: Any) -> TrainSpec | None:
    """The mark of ``obj``, or None.

    A method, partial, partialmethod, staticmethod or classmethod has its function's mark. A wrapper has none.
    """
    for cls in type(obj).__mro__:
        if isinstance(mark := vars(cls).get(_MARK), TrainSpec):
            return mark
    if isinstance(obj, (functools.partial, functools.partialmethod)):
        return get_mark(obj.func)  # pyright: ignore[reportUnknownMemberType]
    if isinstance(obj, (types.MethodType, staticmethod, classmethod)):
        return get_mark(obj.__func__)  # pyright: ignore[reportUnknownMemberType]
    mark = getattr(obj, "__dict__", {}).get(_MARK)
    if isinstance(mark, _Mark):
        return mark.spec if mark.belongs_to(obj) else None
    return mark if isinstance(mark, TrainSpec) else None


def set_mark(obj: T, spec: TrainSpec) -> T:
    """Set the mark of ``obj`` and return it, for integrations that open the scope themselves."""
    setattr(obj, _MARK, _Mark(obj, spec) if isinstance(obj, types.FunctionType) else spec)
    return obj


def mark_callable(obj: Any, spec: TrainSpec) -> Any:
    """``obj``, a callable, in a proxy whose calls run in the scope ``spec.name``. It binds to instances if ``obj`` does."""
    scoped = scope_function(obj if inspect.isroutine(obj) else obj.__call__, spec.name)
    # Frameworks inspect ``obj.__call__`` (is it a coroutine function?), so the proxy's must be of the same kind.
    body: dict[str, Any] = {"__module__": type(obj).__module__, "__call__": staticmethod(scoped), _MARK: spec}
    if hasattr(type(obj), "__get__"):
        body["__get__"] = _bind
    if isinstance(obj, types.MethodType):
        body["__func__"] = staticmethod(scope_function(obj.__func__, spec.name))
    return type(str(type(obj).__name__), (_MarkedCallable,), body)(obj)


class _MarkedCallable(wrapt.ObjectProxy[Any]):
    def __reduce_ex__(self, protocol: Any) -> Any:
        if _is_global(self):
            return self.__qualname__
        return _restore_callable, (self.__wrapped__, get_mark(self))

    def __copy__(self) -> Any:
        return mark_callable(copy.copy(self.__wrapped__), getattr(type(self), _MARK))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return mark_callable(copy.deepcopy(self.__wrapped__, memo), getattr(type(self), _MARK))


def _bind(self: _MarkedCallable, instance: Any, owner: type[Any] | None = None) -> Any:
    bound = self.__wrapped__.__get__(instance, owner)
    return self if bound is self.__wrapped__ else mark_callable(bound, getattr(type(self), _MARK))


def _is_global(obj: Any) -> bool:
    """Whether the module of ``obj`` has it under its qualified name, so it pickles by reference."""
    module, name = sys.modules.get(getattr(obj, "__module__", "")), getattr(obj, "__qualname__", None)
    try:
        return isinstance(name, str) and operator.attrgetter(name)(module) is obj
    except AttributeError:
        return False


def _restore_callable(obj: Any, spec: TrainSpec) -> Any:
    register_mark(spec.name, spec.policy)
    return mark_callable(obj, spec)


MakeClass = Callable[[type[Any], TrainSpec], type[Any]]


def make_marked_class(
    cls: type[Any], spec: TrainSpec, make: MakeClass, methods: Mapping[str, Any] | None = None
) -> type[Any]:
    """A subclass of ``cls`` with the mark and ``methods``. Its instances copy and pickle if instances of ``cls`` do.

    ``make``: the function of a module that made this class, called again where a pickle is loaded.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = cast(Any, cls).__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        function, arguments, *rest = reduced
        arguments = tuple(cls if argument is type(self) else argument for argument in arguments)
        return _restore_instance, (make, spec, function, arguments), *rest

    # Same name and module, because hosts use both when they serialize and as keys of caches.
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    body |= {"__reduce_ex__": reduce, **(methods or {})}
    return set_mark(types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(body)), spec)


def change_class(obj: T, cls: type[Any]) -> T:
    """Make ``obj`` an instance of ``cls`` and return it. Bypasses pydantic's __setattr__, which accepts fields only."""
    object.__setattr__(obj, "__class__", cls)
    return obj


def _restore_instance(
    make: MakeClass, spec: TrainSpec, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    register_mark(spec.name, spec.policy)
    obj = function(*arguments)
    return obj if get_mark(obj) == spec else change_class(obj, make(type(obj), spec))
